"""A stand-in for `torch.classes.fbgemm.RawEmbeddingStreamer` (RES), whose networking the public FBGEMM lacks.

A table-batched module created with `enable_raw_embedding_streaming=True` makes one, and hands it rows in its prefetch:
those of the cache, and since 1.9 those of tables in HBM. These calls come one to three steps late, without optimizer
states, and leave out rows that the cache had no place for, and the last steps. So the stand-in takes the calls,
whatever their arguments, and does nothing in them. It is `FbgemmTap`, put on each module at its first lookup for
training, that marks the rows at their update, wherever they are; they are read when they are sent, and nothing writes
to tables or caches.

Source: `fbgemm_gpu/split_table_batched_embeddings_ops_training.py`, fbgemm-gpu 1.7.0 to 1.9.0, and
`torchrec/distributed/batched_embedding_kernel.py` (`_populate_res_params`), torchrec 1.7.0 to 1.9.2.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from headrace.kernels.dtypes import DTYPES
from headrace.kernels.module_walk import is_a
from headrace.kernels.plain_context import in_plain_context
from headrace.paramserver.rpc.address import SERVER_ENV, server_in
from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import ConfigError, HeadraceError, RequestError, UnsupportedModelError
from headrace.schemas.tables import MAX_DIM
from headrace.streamer.api import RawEmbeddingStreamer
from headrace.streamer.config import StreamerSettings
from headrace.streamer.taps.fbgemm import FbgemmTap, FusedTables, is_table_batched, load_fbgemm, table_parts
from headrace.streamer.taps.guards.tapped_modules import add_tapped, check_untapped, is_tapped, remove_tapped
from headrace.streamer.taps.hooks import ModuleHook
from headrace.streamer.taps.local_parts import TableCopy
from headrace.streamer.taps.tapped_table import TablePart, TappedTable
from headrace.streamer.taps.torchrec import has_kernel, is_sharded, table_part
from headrace.streamer.world import current_world

__all__ = ["install"]

_log = logging.getLogger(__name__)
_PORT_VARIABLE = "LOCAL_RES_PORT"
_CLASS = "RawEmbeddingStreamer"
_EXTRAS = _IDENTITIES, _META = "hash_zch_identities", "hash_zch_runtime_meta"
# What the stand-in and `FbgemmTap` read of a module before its first lookup.
_ATTRIBUTES = (
    *("res_params", "embedding_specs", "feature_table_map", "lxu_cache_weights", "optimizer"),
    *("placeholder_autograd_tensor", "split_embedding_weights", "step", "timestep", "weights_precision"),
    "_used_rowwise_adagrad_with_global_weight_decay",
)


@in_plain_context
def install(
    address: str | None = None,
    *,
    run: str = "res",
    streamer: RawEmbeddingStreamer | None = None,
    enabled_tables: str | Sequence[str] | None = None,
    publish: Literal["updated", "all"] = "updated",
    **settings: Unpack[StreamerSettings],
) -> RawEmbeddingStreamer:
    """Stream every table-batched module that is made after this with `enable_raw_embedding_streaming=True`.

    Also those that TorchRec's `DistributedModelParallel` makes. Call it once, on all ranks together, after
    `torch.distributed` is initialized and before the model is made; the streamer's `close` ends it.

    A module is taken at its first lookup for training. Its tables have the names of RES, without their module's path.
    After `load_state_dict`, its rows are compared with the store's then.

    Args:
        address: As of `RawEmbeddingStreamer`; None takes the environment's HEADRACE_SERVER, or else this machine at
            the port LOCAL_RES_PORT, as RES does.
        run: Name of the training job.
        streamer: Sends the rows, instead of one made with `address`, `run` and `settings`.
        enabled_tables: Names of the tables to stream: a list, or a string of TorchRec's `res_enabled_tables`, either
            joined by commas or a JSON list. None or none of them for all. A table that the module's own
            `res_params.res_enabled_tables` leaves out is not streamed either.
        publish: `updated` sends rows once they change; `all` sends every row of a module first.
        **settings: Fields of `StreamerConfig`. With `on_error="log"` a module that cannot be streamed trains on, and
            the log says why; else its construction or its first lookup raises. So do identities and meta that cannot
            be stored; the log drops those.

    Returns:
        The streamer, to `flush` and `close`.

    Raises:
        ConfigError: No address is given, an argument is wrong, or this is installed already.
        UnsupportedModelError: FBGEMM cannot be loaded with this torch.
        UnavailableError: No server answers.
    """
    global _installed
    if _installed is not None:
        raise ConfigError("headrace.res is installed already: close() the streamer of the first install")
    if publish not in ("updated", "all"):
        raise ConfigError(f"publish {publish!r} is neither 'updated' nor 'all'")
    enabled = _decode_tables(enabled_tables)
    load_fbgemm()

    is_new = streamer is None
    if streamer is None:
        streamer = RawEmbeddingStreamer(address or _address(), run=run, **settings)
    elif address is not None or settings:
        raise ConfigError("give a streamer, or an address and settings, not both")
    installation = _Installation(streamer, enabled, publishes_all=publish == "all")
    try:
        streamer.attach_tap(installation.begin)
    except BaseException:
        if is_new:
            streamer.close(flush=False)
        raise
    _installed = installation
    return streamer


class ResStandIn:
    """What a module gets as its RES streamer; takes any call, of any version, and returns at once."""

    def __init__(self, take: Callable[[Any], None] | None = None) -> None:
        """Have `take` called with the row ids that others than FBGEMM hand over; None ignores them."""
        self._take = take

    def stream(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing in FBGEMM's own calls: the rows were marked when they were updated.

        A module that is derived from FBGEMM's may hand over rows that it has written itself. Those are marked: the ids,
        the first argument, count through all tables of the module, and negative ones are none.
        """
        caller: str = sys._getframe(1).f_globals.get("__name__", "")
        if self._take is not None and not caller.startswith("fbgemm_gpu."):
            self._take(args[0] if args else kwargs.get("indices"))

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a method that does nothing, for those that wait for copies, as they are named in each version."""
        if name.startswith("__"):
            raise AttributeError(name)
        return _do_nothing


class _Installation:
    """Takes the place of the class; a tap without tables, whose steps are those of all modules.

    A step is over when a module that was updated in it is looked up again: updates are part of `backward()`, and no
    lookup comes between two of one `backward()`, except those of activation checkpoints, which do not count.

    A rank that streams no table counts too, or the run's step would stay with it: by the lookups of its modules that
    are made for RES, and of TorchRec's sharded ones, whose rows may all be on other ranks.
    """

    def __init__(self, streamer: RawEmbeddingStreamer, enabled: frozenset[str], *, publishes_all: bool) -> None:
        self.tables: list[TappedTable] = []
        self.names: frozenset[str] = frozenset()
        self.unstreamed: dict[str, str] = {}  # what has failed, with the error
        self.streamer = streamer
        self.enabled = enabled
        self.publishes_all = publishes_all
        self.parts: list[tuple[TablePart, range, range]] = []
        self.taps: list[_ModuleTap] = []
        self.num_ranks = current_world().size
        # Taps of modules that were updated in this step; without any, modules that were looked up.
        self._updated: set[int] = set()
        self._watches: list[RemovableHandle] = []
        self._watched = weakref.WeakSet[nn.Module]()  # a module may be registered twice
        self._has_warned = self._has_warned_of_rows = False
        self._on_step: Callable[[], None] = lambda: None
        self._original: Any = None
        self._waiting: list[RemovableHandle] = []

    def begin(self, on_step: Callable[[], None]) -> _Installation:
        self._on_step = on_step
        self._original = getattr(torch.classes.fbgemm, _CLASS)
        _provide_masked_index_select()
        setattr(torch.classes.fbgemm, _CLASS, self._make)
        self._watches.append(register_module_module_registration_hook(self._note_module))
        return self

    def note_update(self, tap: _ModuleTap) -> None:
        self._updated.add(id(tap))

    def note_lookup(self, tap: _ModuleTap) -> None:
        """End the step if the module was updated in it."""
        if id(tap) in self._updated:
            self.end_step()

    def end_step(self) -> bool:
        self.sweep()
        had_updates = bool(self._updated)
        if had_updates:
            if not self.taps and not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "no table is streamed on this rank: of the modules that train, none has both "
                    "enable_raw_embedding_streaming and a table that is enabled"
                )
            self._updated.clear()
            self._on_step()
        return had_updates

    def sweep(self) -> None:
        for tap in self.taps:
            tap.sweep()

    def copies(self) -> list[TableCopy]:
        return []

    def new_tables(self) -> list[str]:
        return []

    def close(self) -> None:
        global _installed
        if self._original is not None:
            setattr(torch.classes.fbgemm, _CLASS, self._original)
            self._original = None
            _remove(self._waiting)
            _remove(self._watches)
            if _installed is self:
                _installed = None

    def _note_module(self, _: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is not None and is_sharded(module):
            self._watch(module)

    def _watch(self, module: nn.Module) -> None:
        """End a step at each second lookup of a module for training, while nothing is streamed."""

        def note(*_: Any) -> None:
            if not self.taps and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                if id(module) in self._updated:
                    self.end_step()
                self._updated.add(id(module))

        if not self.taps and module not in self._watched:
            self._watched.add(module)
            self._watches.append(module.register_forward_pre_hook(ModuleHook(note)))

    def _make(self, *_: Any, **__: Any) -> ResStandIn:
        """Return a stand-in to the module whose constructor calls this.

        The arguments differ between versions, and leave out columns and whole sizes: the module and the TorchRec kernel
        that makes it have all.
        """
        frame = sys._getframe(1)
        module = frame.f_locals.get("self")
        try:
            if not isinstance(module, nn.Module) or not is_table_batched(module):
                raise UnsupportedModelError(
                    f"{frame.f_code.co_qualname} made a {_CLASS}: only SplitTableBatchedEmbeddingBagsCodegen is "
                    f"streamed instead of it; call the installed streamer's close() first"
                )
            _check_attributes(module, ("res_params",))
            kernel = _kernel_of(module, frame.f_back)
        except HeadraceError as exc:
            self.fail("a module", exc)
            return ResStandIn()

        def take(_: Any, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():
                self._take(module, kernel, args, kwargs)  # if it raises, the next lookup tries again
                handle.remove()

        self._watch(module)
        handle = module.register_forward_pre_hook(ModuleHook(take), with_kwargs=True)
        self._waiting.append(handle)
        known = weakref.ref(module)  # it holds what this returns
        return ResStandIn(lambda row_ids: self._take_rows(known(), row_ids))

    def _take_rows(self, module: Any, row_ids: Any) -> None:
        """Mark rows that a module's own code hands over."""
        tap = next((each for each in self.taps if each.module is module), None)
        if tap is not None:
            tap.take_rows(row_ids)
        elif not self._has_warned_of_rows:
            self._has_warned_of_rows = True
            _log.warning(
                "rows that a module handed to its RES streamer are not sent: none of its tables is streamed, or not "
                "before its first lookup for training"
            )

    def _take(self, module: Any, kernel: _Kernel | None, args: Any, kwargs: Any) -> None:
        """Stream a module, whose first lookup for training is about to begin."""
        if is_tapped(module):  # by `attach`
            return
        try:
            num_ranks = current_world().size
            if num_ranks != self.num_ranks:
                raise ConfigError(
                    f"headrace.res was installed as one of {self.num_ranks} ranks, and now there are {num_ranks}: call "
                    f"install() after torch.distributed is initialized"
                )
            _check_attributes(module, _ATTRIBUTES)
            if kernel is not None and kernel.is_replicated:
                raise UnsupportedModelError("DMPCollection (2D parallel) writes its rows in sync(): attach() the model")
            parts = self._parts(module, kernel)
            if not any(parts):
                return
            added = self._placed(parts, module.split_embedding_weights())
            extras = _extras_of(args, kwargs)
            self.streamer.attach_tap(lambda _: _ModuleTap(self, module, kernel, parts, extras))
            self.parts += added
        except HeadraceError as exc:
            self.fail("a module", exc)

    def fail(self, what: str, error: HeadraceError) -> None:
        """Raise the error that keeps something from being streamed, or log it, as `on_error` says."""
        if self.streamer.config.on_error != "log":
            raise error
        if what == "a module":
            self.unstreamed.setdefault(f"a module of {_CLASS}", str(error))
        _log.error("%s is not streamed: %s", what, error)

    def _parts(self, module: Any, kernel: _Kernel | None) -> tuple[TablePart | None, ...]:
        """Return the part of a table that each of the module's is; None for those that are not enabled."""
        found = _parts_of(module) if kernel is None else [table_part(table.name, table) for table in kernel.tables]
        names = [part.fqn for part in found]
        own = frozenset(getattr(module.res_params, "res_enabled_tables", ()))  # since 1.9
        is_enabled = [all(name in allowed for allowed in (own, self.enabled) if allowed) for name in names]
        if not any(is_enabled):
            wanted = sorted(self.enabled or own)
            _log.warning("none of the tables %s is enabled by %s: not streamed", *map(_listed, (names, wanted)))
        num_shards = module.res_params.res_store_shards
        if num_shards not in (1, self.streamer.num_shards):
            _log.warning("res_store_shards is %d, but the server has %d", num_shards, self.streamer.num_shards)
        return tuple(part if enabled else None for part, enabled in zip(found, is_enabled, strict=True))

    def _placed(
        self, parts: Sequence[TablePart | None], weights: Sequence[torch.Tensor]
    ) -> list[tuple[TablePart, range, range]]:
        """Return parts with their rows and columns; refuse those that would overwrite others, or one another."""
        added: list[tuple[TablePart, range, range]] = []
        for part, (num_rows, num_columns) in zip(parts, (each.shape for each in weights), strict=True):
            if part is None:
                continue
            rows = range(part.row_offset, part.row_offset + num_rows)
            columns = range(part.column_offset, part.column_offset + num_columns)
            if not (rows.start >= 0 and rows.stop <= part.num_rows and columns.stop <= part.dim):
                raise ConfigError(
                    f"table {part.fqn!r}: rows {rows.start}:{rows.stop} are not in its {part.num_rows}: give its "
                    "offset in table_offsets of res_params, or attach() the model"
                )
            for other, other_rows, other_columns in (*self.parts, *added):
                if other.fqn == part.fqn and _overlap(rows, other_rows) and _overlap(columns, other_columns):
                    raise UnsupportedModelError(
                        f"two tables are named {part.fqn!r} and have the same rows and columns: give them different "
                        f"names, or attach() the model, which names them by their modules; if the module was made "
                        f"again (resharded), close() the streamer before, and install again"
                    )
            added.append((part, rows, columns))
        return added


_installed: _Installation | None = None


class _ModuleTap:
    """The tap on one module: `FbgemmTap`, with the identities and runtime meta that lookups are given."""

    def __init__(
        self,
        installation: _Installation,
        module: Any,
        kernel: _Kernel | None,
        parts: tuple[TablePart | None, ...],
        extras: dict[str, Any],
    ) -> None:
        """Hook a module whose first lookup, with these extras, is about to begin."""
        self._installation = installation
        self.module = self._module = module
        self._has_warned = self._has_dropped = False
        self.unstreamed: dict[str, str] = {}
        self.names = frozenset(part.fqn for part in parts if part is not None)
        self._sources: dict[str, _LookupIdentities] = {}
        self._no_meta: torch.Tensor | None = None  # `[0, width]`, of the type and width that all meta needs
        if self._usable(_IDENTITIES, extras[_IDENTITIES], None) is not None:
            if (meta := self._usable(_META, extras[_META], None)) is not None:
                self._no_meta = torch.empty(0, meta.shape[1], dtype=meta.dtype, device="cpu")
            self._sources = {fqn: _LookupIdentities(self._no_meta) for fqn in self.names}
        is_in_use = (lambda: True) if kernel is None else kernel.is_in_use
        fused = FusedTables(module=module, parts=parts, identities=self._sources, is_in_use=is_in_use)
        check_untapped([(fused.names, module)])
        self._tap = FbgemmTap(fused, note_update=lambda: installation.note_update(self))
        self._tap.warn_wide_reach()
        self.tables = self._tap.tables
        for table in self.tables:
            if installation.publishes_all:
                table.mark_all()
        self._handles = [
            module.register_forward_pre_hook(ModuleHook(self._before_forward)),
            module.register_forward_hook(ModuleHook(self._after_forward), with_kwargs=True),
        ]
        installation.taps.append(self)
        add_tapped([("", module)], installation.streamer)

    def copies(self) -> list[TableCopy]:
        return []

    def new_tables(self) -> list[str]:
        return []

    def end_step(self) -> bool:
        return False  # the installation does

    def sweep(self) -> None:
        self._tap.sweep()

    def close(self) -> None:
        if self._handles:
            self._tap.close()
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._installation.taps.remove(self)
            remove_tapped([("", self._module)])

    @in_plain_context
    def take_rows(self, row_ids: Any) -> None:
        """Mark rows that the module's own code has written, ids through all its tables; all rows if it gives no ids."""
        if isinstance(row_ids, torch.Tensor):
            self._tap.mark_rows(row_ids)
        else:
            self._tap.mark_all()

    def _before_forward(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # no activation checkpoint's
            self._installation.note_lookup(self)

    def _after_forward(self, module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        """Keep the extras with the lookup until its update."""
        extras = _extras_of(args, kwargs)
        identities, meta = (self._usable(name, extras[name], module._indices.numel()) for name in _EXTRAS)
        is_late = (identities is not None and not self._sources) or (meta is not None and self._no_meta is None)
        if is_late and not self._has_warned:
            self._has_warned = True
            if identities is None and not self._sources:
                reason = "runtime meta without identities is not streamed"
            else:
                reason = "identities, or runtime meta with them, came after lookups without: not streamed"
            _log.warning("tables %s: %s", first_of(sorted(self.names)), reason)
        if output.grad_fn is None or not self._sources:
            return
        indices, spans = module._indices, list(self._tap.last_lookup())

        @in_plain_context
        def put(*_: Any) -> None:
            if self._handles:
                for table, span in spans:
                    self._put(
                        table, indices[span], *(None if each is None else each[span] for each in (identities, meta))
                    )

        output.grad_fn.register_hook(put)

    def _usable(self, name: str, extra: Any, num_ids: int | None) -> Any:
        """Return an extra of a lookup; None if it cannot be stored and `on_error` lets that pass."""
        reason = _refusal(name, extra, num_ids, self._no_meta)
        if reason is None:
            return extra
        if not self._has_dropped:
            error = RequestError(f"tables {first_of(sorted(self.names))}: {reason}")
            self._installation.fail("what a lookup brings", error)
            self._has_dropped = True
        return None

    def _put(self, table: TappedTable, ids: torch.Tensor, identities: Any, meta: Any) -> None:
        """Keep the extras of rows, which may repeat, until they are sent."""
        rows, at = np.unique(ids.cpu().numpy().astype(np.int64, copy=False), return_index=True)
        rows, first = rows[rows >= 0], torch.from_numpy(at[rows >= 0])

        def of_rows(extra: Any) -> Any:
            return None if extra is None else extra.detach().index_select(0, first.to(extra.device)).cpu()

        self._sources[table.path].put(torch.from_numpy(rows), of_rows(identities), of_rows(meta))


class _LookupIdentities:
    """The raw ids that lookups gave with rows, and their runtime meta; an `IdentitySource`."""

    def __init__(self, no_meta: torch.Tensor | None) -> None:
        self._rows = torch.empty(0, dtype=torch.int64, device="cpu")
        self._meta = no_meta

    def check(self, fqn: str, num_rows: int) -> None:
        self._rows = torch.full((num_rows,), -1, dtype=torch.int64, device="cpu")
        if self._meta is not None:
            self._meta = self._meta.new_zeros(num_rows, self._meta.shape[1])

    def __call__(self) -> torch.Tensor:
        return self._rows

    def meta(self) -> torch.Tensor | None:
        return self._meta

    def put(self, rows: torch.Tensor, identities: torch.Tensor | None, meta: torch.Tensor | None) -> None:
        """Set those of unique rows, int64[n], all on the CPU: none is -1, and zeros."""
        self._rows[rows] = -1 if identities is None else identities.reshape(-1).long()
        if self._meta is not None:
            self._meta[rows] = 0 if meta is None else meta

    def take_reassigned(self) -> None:
        return None  # a row gets another id only with an update

    def watch(self, mark: Callable[[torch.Tensor], None]) -> tuple[()]:
        return ()


def _extras_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the identities, `[ids]` or `[ids, 1]`, and runtime meta, `[ids, width]`, that a lookup gets, or None."""
    # `forward(indices, offsets, per_sample_weights, feature_requires_grad, batch_size_per_feature_per_rank,
    # total_unique_indices, hash_zch_identities, hash_zch_runtime_meta)`; some versions have not the last.
    return {name: kwargs.get(name, args[at] if len(args) > at else None) for at, name in enumerate(_EXTRAS, start=6)}


def _refusal(name: str, extra: Any, num_ids: int | None, no_meta: torch.Tensor | None) -> str | None:
    """Return why identities or meta of a lookup of so many ids cannot be stored; None if they can.

    `no_meta`, `[0, width]`, is like the meta of a module's earlier lookups; None before the first.
    """
    if extra is None:
        return None
    if not extra.dim() or (num_ids is not None and extra.shape[0] != num_ids):
        return f"{name} of shape {tuple(extra.shape)} for {num_ids} ids: give one row per id"
    if name == _IDENTITIES:
        return (
            None if extra.numel() == extra.shape[0] else f"identities of shape {tuple(extra.shape)}: give one per row"
        )
    if extra.dim() != 2 or not 0 < extra.shape[1] <= MAX_DIM or extra.dtype not in DTYPES:
        return f"runtime meta is {_described(extra)}: give each row 1 to {MAX_DIM} numbers of a type that is stored"
    if no_meta is not None and _described(extra) != _described(no_meta):
        return (
            f"runtime meta is {_described(extra)} after {_described(no_meta)}: give each row equally many of one type"
        )
    return None


def _described(meta: torch.Tensor) -> str:
    return f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape[1:])} a row"


def _check_attributes(module: Any, names: Sequence[str]) -> None:
    for name in names:
        if not hasattr(module, name):
            raise UnsupportedModelError(
                f"this fbgemm_gpu is not known, 1.7 to 1.9 are: its {type(module).__name__} has no {name!r}; attach() "
                f"the model or take another version"
            )


@dataclass(frozen=True, slots=True)
class _Kernel:
    """The TorchRec kernel that makes a module, and the sharded module that it is made for, if that is known."""

    kernel: Any
    sharded: nn.Module | None

    @property
    def tables(self) -> Sequence[Any]:
        """The `ShardedEmbeddingTable`s."""
        found: Sequence[Any] = self.kernel._config.embedding_tables
        return found

    @property
    def is_replicated(self) -> bool:
        """Whether each row is in several groups of ranks."""
        return is_a(getattr(self.sharded, "_env", None), "ShardingEnv2D")

    def is_in_use(self) -> bool:
        """Return whether the model still uses it; resharding makes new ones."""
        return self.sharded is None or has_kernel(self.sharded, self.kernel)


def _kernel_of(module: Any, frame: FrameType | None) -> _Kernel | None:
    """Return the TorchRec kernel that is making a module, found among the callers; None without one."""
    names = list(module.res_params.table_names)
    kernel: Any = None
    for caller in _callers(frame):
        if is_a(caller, "BaseBatchedEmbedding") or is_a(caller, "BaseBatchedEmbeddingBag"):
            if kernel is None and [table.name for table in caller._config.embedding_tables] == names:
                kernel = caller
        elif kernel is not None and is_sharded(caller):
            return _Kernel(kernel, caller)
    return None if kernel is None else _Kernel(kernel, None)


def _callers(frame: FrameType | None) -> Iterator[Any]:
    """Yield `self` of each function on the stack; of the user's classes too, of which nothing may be asked."""
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back


def _parts_of(module: Any) -> list[TablePart]:
    """Return the parts that a module's `res_params` describe, or whole tables if it has no names."""
    res = module.res_params
    whole = list(table_parts("", module))
    names = list(res.table_names) or [part.fqn for part in whole]
    offsets = list(res.table_offsets) or [0] * len(names)
    if not len(names) == len(offsets) == len(whole):
        counts = f"{len(names)} table_names and {len(offsets)} table_offsets"
        raise ConfigError(f"res_params have {counts} for {len(whole)} tables: give one of each for every table")
    return [
        TablePart(fqn=name, num_rows=offset + part.num_rows, dim=part.dim, row_offset=offset)
        for name, offset, part in zip(names, offsets, whole, strict=True)
    ]


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _listed(names: Sequence[str]) -> str:
    return first_of([repr(name) for name in names])


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _decode_tables(tables: str | Sequence[str] | None) -> frozenset[str]:
    """Return the names in TorchRec's `res_enabled_tables`, exactly as it splits them."""
    if isinstance(tables, str) and tables.startswith("["):
        try:
            tables = json.loads(tables)
        except ValueError as exc:
            raise ConfigError(f"enabled_tables {tables!r} is no JSON list ({exc}): give a list of names") from exc
    elif isinstance(tables, str):
        tables = tables.split(",") if tables else ()
    names = tables or ()
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"enabled_tables {tables!r} is neither a list of names nor a string of them: give a list")
    return frozenset(names)


def _address() -> str:
    if address := server_in(os.environ):
        return address
    port = os.environ.get(_PORT_VARIABLE, "")
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(
            f"no address: call install('host:port'), or set {SERVER_ENV} to one, or {_PORT_VARIABLE}, which is "
            f"{port!r}, to a port of this machine"
        )
    return f"127.0.0.1:{port}"


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


# Holds the operator's registration: it would end with this object.
_operators: list[Any] = []


def _provide_masked_index_select() -> None:
    """Define the operator with which a module picks cached rows for RES, if this build of FBGEMM lacks it.

    It belongs to FBGEMM's SSD tables, which public wheels leave out; without it a module's second prefetch raises
    AttributeError.
    """
    if hasattr(torch.ops.fbgemm, "masked_index_select"):
        return
    library: Any = torch.library.Library("fbgemm", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(
        "masked_index_select(Tensor(a!) self, Tensor indices, Tensor values, Tensor count, bool use_pipeline=False, "
        "int preferred_sms=-1) -> Tensor(a!)"
    )
    library.impl("masked_index_select", _masked_index_select, "CompositeExplicitAutograd")
    _operators.append(library)


def _masked_index_select(
    out: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    use_pipeline: bool = False,
    preferred_sms: int = -1,
) -> torch.Tensor:
    """Set `out[i] = values[indices[i]]` for the first `count` indices that are not negative; return `out`.

    Other callers than RES get their rows too: FBGEMM's SSD tables use the operator for their caches. Waits for no GPU.
    """
    num_places = min(indices.numel(), out.shape[0])
    if num_places and values.shape[0]:
        indices, places = indices[:num_places], torch.arange(num_places, dtype=torch.int64, device=indices.device)
        is_taken = (indices >= 0) & (places < count.to(indices.device))
        rows = values.index_select(0, indices.clamp(min=0).long().to(values.device))
        head = out[:num_places]
        head.copy_(torch.where(is_taken.to(out.device).view(-1, 1), rows.to(out.device), head))
    return out
