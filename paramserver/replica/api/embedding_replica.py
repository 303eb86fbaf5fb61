"""The public class of serving: a copy of the tables that follows the server while it answers lookups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy.typing as npt
import torch

from headrace.kernels.dtypes import tensor_of
from headrace.kernels.plain_context import in_plain_context
from headrace.paramserver.reading.dense_parts import DensePart
from headrace.paramserver.replica.copy.array_replica import ArrayReplica
from headrace.paramserver.replica.copy.table_set import TableSet
from headrace.paramserver.replica.tables.base import Bools, Ids, ReplicaTable, Rows, default_row
from headrace.schemas.tables import TableSpec, as_ids
from headrace.schemas.version import Version

__all__ = ["DenseParameters", "EmbeddingReplica", "as_tensor"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DenseParameters:
    """The dense parameters and buffers of one model as the trainer had them at one step.

    Attributes:
        epoch: Epoch of the run that published them.
        step: The step at which it did.
        row_epoch: `EmbeddingReplica.epoch` at the same moment.
        row_step: `EmbeddingReplica.step` at the same moment. With `consistency="step"` it equals `step` while the
            trainer publishes dense tensors.
        tensors: By path in the model's `state_dict`: copies on the CPU.
    """

    epoch: int
    step: int
    row_epoch: int
    row_step: int
    tensors: dict[str, torch.Tensor]


def as_tensor(part: DensePart, path: str) -> torch.Tensor:
    """Return a copy of one tensor of a part, on the CPU."""
    # torch's own allocation is aligned as the trainer's: BLAS rounds differently otherwise.
    return tensor_of(part.tensors[path], part.specs[path].dtype).clone()


class EmbeddingReplica(ArrayReplica):
    """Serves embedding lookups from this process's own copy of the tables, milliseconds behind the trainer.

        with EmbeddingReplica("127.0.0.1:7601", consistency="step") as replica:
            rows = replica.lookup("user.weight", [3, 5, 8])

    The replica starts from a snapshot or by reading the running server, then follows each shard's update log on its own
    thread. It reconnects to a server that restarts. If the log that it needs is gone, or another store answers, it
    builds a new copy aside and switches to it when the new copy has caught up; lookups use the old copy until then.

    Thread: any, for every method. In a forked child all methods raise, except `close`, which does nothing. A replica
    cannot be pickled into a spawned process; create one in each process.

    Attributes:
        num_missing: Number of ids that lookups did not find, by fqn.
    """

    def lookup(self, fqn: str, ids: npt.ArrayLike | torch.Tensor) -> torch.Tensor:
        """Return rows of one table.

        Args:
            fqn: Table.
            ids: Row ids, any shape.

        Returns:
            A copy, `[*ids.shape, dim]` in the table's dtype, on the CPU.

        Raises:
            UnknownTableError: The replica has no such table.
            RowRangeError: An id is not a row of the table.
            RequestError: A row is missing and the setting `missing` is `error`.
        """
        return self.lookup_many({fqn: ids})[fqn]

    @in_plain_context
    def lookup_many(self, ids_of: Mapping[str, npt.ArrayLike | torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return rows of several tables, all from one moment; see `lookup`."""
        wanted = {fqn: as_ids(ids) for fqn, ids in ids_of.items()}

        def gather(table: ReplicaTable, ids: Ids) -> tuple[torch.Tensor, Bools]:
            rows, missing = table.gather(ids)
            return tensor_of(rows, table.spec.dtype), missing

        found = self.look([(fqn, ids.reshape(-1), gather) for fqn, ids in wanted.items()])
        return {
            fqn: rows.view(*ids.shape, rows.shape[-1]) for (fqn, ids), rows in zip(wanted.items(), found, strict=True)
        }

    @in_plain_context
    def lookup_by_identity(self, fqn: str, identities: npt.ArrayLike | torch.Tensor) -> torch.Tensor:
        """Return the rows that some raw ids are mapped to, for tables with zero-collision hashing.

        An identity belongs to the row that was written with it last, and to no row if that row has another identity by
        now or is deleted. An identity without a row counts as a missing row; -1 never has one.

        Returns:
            A copy, `[*identities.shape, dim]` in the table's dtype, on the CPU.

        Raises:
            UnknownTableError: The replica has no such table.
            RequestError: The table has no identities; or an identity has no row and the setting `missing` is `error`.
        """
        wanted = as_ids(identities)

        def default_of(spec: TableSpec) -> Rows:
            return default_row(spec, self._config.default_of(spec))

        spec, (rows, missing) = self._with_table_set(
            lambda table_set: table_set.look_by_identity(fqn, wanted.reshape(-1), default_of)
        )
        self._count_missing(spec.fqn, wanted.reshape(-1), missing, what="identity")
        return tensor_of(rows, spec.dtype).view(*wanted.shape, spec.dim)

    @in_plain_context
    def lookup_runtime_meta(self, fqn: str, ids: npt.ArrayLike | torch.Tensor) -> torch.Tensor:
        """Return what zero-collision hashing keeps with the raw ids of rows: look-up counts, or the user's numbers.

        For raw ids call `find_rows` first, both within `at_one_moment`. A row that is not there has zeros and does not
        count as missing.

        Args:
            fqn: Table.
            ids: Row ids, any shape; -1, as `find_rows` returns it for no row, has zeros.

        Returns:
            A copy, `[*ids.shape, width]` in the meta's own dtype, on the CPU.

        Raises:
            UnknownTableError: The replica has no such table.
            RowRangeError: An id is not a row of the table.
            RequestError: The table has no runtime meta.
        """
        wanted = as_ids(ids)
        state, found = self.look_up_meta(fqn, wanted.reshape(-1))
        return tensor_of(found.view(state.dtype.numpy), state.dtype).view(*wanted.shape, state.width)

    @in_plain_context
    def dense(self, model: str | None = None) -> DenseParameters:
        """Return the dense parameters and buffers of a model, all of one step.

        With `consistency="step"` it is the step that lookups see, if the trainer publishes dense tensors with it;
        otherwise the newest one that has come whole. Within `at_one_moment` it is of the same moment as lookups.

        Args:
            model: Name of the model; None for the only one that has dense tensors.

        Raises:
            UnavailableError: No step has come whole yet.
            UnknownTableError: The model has no dense tensors here.
            RequestError: Several models have some and none is named.
        """

        def look(table_set: TableSet) -> tuple[DensePart, Version]:
            return table_set.seqlock.read(lambda: (table_set.dense.part(model), table_set.visible or (0, -1)))

        part, (row_epoch, row_step) = self._with_table_set(look)
        return DenseParameters(
            epoch=part.epoch,
            step=part.step,
            row_epoch=row_epoch,
            row_step=row_step,
            tensors={path: as_tensor(part, path) for path in part.tensors},
        )
