"""Hooks that a copy of their module does not carry on."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from headrace.streamer.taps.module_hook import ModuleHook


def test_hook_acts_on_its_module_and_not_on_copies() -> None:
    """The hook is called, and its result used, on the module it is on; on a deep copy and a pickle it does nothing."""
    calls: list[nn.Module] = []

    def double(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        calls.append(module)
        return output * 2

    module = nn.Identity()
    module.register_forward_hook(ModuleHook(double))
    one = torch.ones(1)
    assert module(one).item() == 2
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin(one).item() == 1
        assert pickle.loads(pickle.dumps(twin))(one).item() == 1
    assert calls == [module]


def test_scripting_says_why_it_cannot() -> None:
    """`torch.jit.script` compiles a module's hooks; of this one, and of a copy, it says what to do instead."""
    module = nn.Identity()
    handle = module.register_forward_hook(ModuleHook(lambda *_: None))
    for streamed in (module, copy.deepcopy(module)):
        with pytest.raises(AttributeError, match=r"script the model before attach\(\) or after the streamer's close"):
            torch.jit.script(streamed)
    handle.remove()
    torch.jit.script(module)
