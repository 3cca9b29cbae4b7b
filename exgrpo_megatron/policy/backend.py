"""Runs unmodified Megatron-Core on a machine without CUDA; where CUDA is available it does nothing.

Megatron-Core names the accelerator in four ways: `torch.cuda.<function>()`, `device="cuda"` in tensor factories, the
type string "torch.cuda.FloatTensor", and `Tensor.cuda()`. `install` gives the modules of `megatron.core`, and nobody
else, a stand-in for the name `torch` that resolves the first two to the CPU; the others are answered only while the few
functions that use them run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch


def install() -> None:
    """Make Megatron-Core usable on this machine. Call before anything of it runs; repeating is harmless."""
    if torch.cuda.is_available() or any(isinstance(finder, _MegatronFinder) for finder in sys.meta_path):
        return
    stand_in = _TorchOnCpu()
    sys.meta_path.insert(0, _MegatronFinder(stand_in))
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGE):
            _adapt(module, stand_in)


_PACKAGE = "megatron.core"
_CPU = torch.device("cpu")
_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "ones", "ones_like", "rand", "randint",
    "randn", "tensor", "zeros", "zeros_like",
)  # fmt: skip
_COMPARE_TYPE_NAMES = {
    "megatron.core.optimizer.clip_grads": ("clip_grad_by_total_norm_fp32",),
    "megatron.core.optimizer.optimizer": (
        "clip_grad_by_total_norm_fp32",
        "Float16OptimizerWithFloat16Params.__init__",
    ),
    "megatron.core.optimizer.distrib_optimizer": ("DistributedOptimizer._build_model_and_main_param_groups",),
}
"""Functions that compare `Tensor.type()` with CUDA spellings, by module."""
_CALL_TENSOR_CUDA = {
    "megatron.core.models.common.embeddings.rotary_pos_embedding": ("get_pos_emb_on_this_cp_rank",),
    "megatron.core.models.common.language_module.language_module": (
        "LanguageModule.setup_embeddings_and_output_layer",
    ),
}
"""Functions that move a tensor with `Tensor.cuda()`, by module."""


class _TorchOnCpu(ModuleType):
    """The module `torch` as `megatron.core` sees it."""

    def __init__(self) -> None:
        super().__init__("torch on CPU, for megatron.core")
        for name in _FACTORIES:
            self.__dict__[name] = _on_cpu(getattr(torch, name))
        self.__dict__["cuda"] = _CudaOnCpu()

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        self.__dict__[name] = value  # keeps this method off the hot path
        return value


class _NoStream:
    """A stream that has always finished: CPU operations are over when they return."""

    def wait_stream(self, _: Any) -> None:
        return None

    def wait_event(self, _: Any) -> None:
        return None


class _CudaOnCpu(ModuleType):
    """The module `torch.cuda` as `megatron.core` sees it: one device, the CPU, and its generator."""

    def __init__(self) -> None:
        super().__init__("torch.cuda on CPU, for megatron.core")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def is_available(self) -> bool:
        return False

    def current_device(self) -> torch.device:
        return _CPU

    def synchronize(self, *_: Any, **__: Any) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def current_stream(self, *_: Any) -> _NoStream:
        return _NoStream()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)


class _MegatronFinder(importlib.abc.MetaPathFinder):
    """Adapts modules of `megatron.core` that are imported after `install`."""

    def __init__(self, stand_in: _TorchOnCpu) -> None:
        self._stand_in = stand_in
        self._searching = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 (the protocol's)
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if self._searching or not fullname.startswith(_PACKAGE):
            return None
        self._searching = True  # the search below asks every finder again, this one too
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _then_adapt(spec.loader.exec_module, self._stand_in)  # type: ignore[method-assign, assignment]
        return spec


def _then_adapt(execute: Callable[[ModuleType], None], stand_in: _TorchOnCpu) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        execute(module)
        _adapt(module, stand_in)

    return exec_module


def _adapt(module: ModuleType, stand_in: _TorchOnCpu) -> None:
    if getattr(module, "torch", None) is torch:
        module.torch = stand_in  # type: ignore[attr-defined]
    if module.__name__ == "megatron.core.tensor_parallel.random":
        module._get_cuda_rng_state = stand_in.cuda.get_rng_state  # type: ignore[attr-defined]
        module._set_cuda_rng_state = stand_in.cuda.set_rng_state  # type: ignore[attr-defined]
    for table, answer in ((_COMPARE_TYPE_NAMES, _cuda_type_names), (_CALL_TENSOR_CUDA, _cuda_moves_nothing)):
        for dotted in table.get(module.__name__, ()):
            owner, _, name = dotted.rpartition(".")
            _run_under(answer, getattr(module, owner) if owner else module, name)


def _run_under(answer: Callable[[], contextlib.AbstractContextManager[None]], holder: Any, name: str) -> None:
    """Wrap `holder.name` (a class method stays one): it runs inside the context `answer()`."""
    stored = vars(holder)[name]
    function = stored.__func__ if isinstance(stored, classmethod) else stored

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with answer():
            return function(*args, **kwargs)

    setattr(holder, name, classmethod(wrapped) if isinstance(stored, classmethod) else wrapped)


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    """Tensors spell their type the CUDA way."""
    original = torch.Tensor.type

    def spelled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(tensor, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = spelled  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _cuda_moves_nothing() -> Iterator[None]:
    """`Tensor.cuda()` is the tensor itself."""
    original = torch.Tensor.cuda
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.cuda = original  # type: ignore[method-assign]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make
