"""The first load, from a checkpoint: every tensor that the model needs must be in it.

vLLM accepts an incomplete checkpoint: it checks unquantized models alone, and only whether a parameter was loaded in
part, so a missing q_proj hides behind k_proj. What was not loaded is whatever the memory held. And while it loads layer
by layer it counts elements: a tensor that comes twice stands in for another one.

The check is by name, as in a live reload (`checkpoint_map`), on the way into the model's `load_weights`. A checkpoint
may name tensors as vLLM knows and this package doesn't; what can't be told then is a warning, never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle
from vllm.config import VllmConfig
from vllm.logger import init_logger

from quads_ops.listing import first_names
from quads_ops.vllm_method import checkpoint_map, compat_vllm, names

_REMEDY = (
    "Save the whole model again (its config.json says what belongs to it), or start with load_format=dummy if the "
    "weights come from a trainer"
)

logger = init_logger(f"vllm.{__name__}")

_looking: RemovableHandle | None = None


def check_when_built(vllm_config: VllmConfig, table: names.NameTable) -> None:
    """Have the model that is being built check its first `load_weights`; called from within its constructor.

    vLLM shows a quantization method the layers of a model, never the model itself. So it is recognized when it
    registers a submodule; a model that holds it as its language model takes its place. With load_format=dummy nothing
    is loaded, and nothing is checked.
    """
    global _looking
    _stop_looking()
    if vllm_config.load_config.load_format == "dummy":
        return
    cls = compat_vllm.get_model_architecture(vllm_config.model_config)[0]
    found: list[torch.nn.Module] = []

    def registered(module: torch.nn.Module, _: str, submodule: torch.nn.Module | None) -> None:
        outer = bool(found) and submodule is found[0] and hasattr(module, "load_weights")
        if outer or (not found and isinstance(module, cls)):
            for inner in found:
                leave_unchecked(inner)
            found[:] = [module]
            _check_once(module, table)

    _looking = register_module_module_registration_hook(registered)


def leave_unchecked(model: torch.nn.Module) -> None:
    """Take the check from a model, before its `load_weights` gets parts of a checkpoint."""
    model.__dict__.pop("load_weights", None)


def _stop_looking() -> None:
    global _looking
    if _looking is not None:
        _looking.remove()
        _looking = None


def _check_once(model: torch.nn.Module, table: names.NameTable) -> None:
    def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args, **kwargs):
        _stop_looking()
        leave_unchecked(model)
        # named_parameters has one name for a parameter that two modules share.
        own = {name for name, _ in model.named_parameters()}
        wanted = {n: w for n, w in checkpoint_map.wanted_weights(model, table).items() if w.parameter in own}
        stream = CheckedStream(wanted, table, checkpoint_map.has_tied_head(model))
        loaded = stream.load(lambda checked: model.load_weights(checked, *args, **kwargs), weights)
        stream.check_complete(loaded)
        return loaded

    model.load_weights = load_weights


class CheckedStream:
    """The names of a checkpoint's tensors as they go by, against what the model wants.

    Args:
        wanted: canonical name -> what is expected.
        table: of the model.
        tied: whether lm_head shares the embedding's weight.
    """

    def __init__(self, wanted: dict[str, checkpoint_map.Wanted], table: names.NameTable, tied: bool):
        self.wanted, self.table, self.tied = wanted, table, tied
        self.seen: set[str] = set()
        self._last: tuple[str, tuple[int, ...]] | None = None

    def load(self, load_weights: Callable, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        """What `load_weights` returns for the stream.

        Raises:
            ValueError: the shape of a tensor that it stumbled over, or a quantized one that came twice.
        """
        try:
            return load_weights(self._noted(weights))
        except Exception as error:
            problem = self._shape_problem()
            if problem is None:
                raise
            raise ValueError(problem) from error

    def check_complete(self, loaded: set[str] | None) -> None:
        """Raise ValueError with the names of tensors that did not come; warn of those that can't be told.

        loaded: vLLM's names of the parameters that `load_weights` says it loaded, wholly or in part.
        """
        absent = [name for name in self.wanted if name not in self.seen and not self._came_otherwise(self.wanted[name])]
        # A parameter with a part that came under a known name has all its parts under known names.
        known = {want.parameter for name, want in self.wanted.items() if name in self.seen}
        all_known = all(name in self.wanted or checkpoint_map.ignorable(name, self.tied) for name in self.seen)

        def surely(want: checkpoint_map.Wanted) -> bool:
            return all_known or want.parameter in known or (loaded is not None and want.parameter not in loaded)

        missing = sorted(name for name in absent if surely(self.wanted[name]))
        if missing:
            count = f"{len(missing)} of {len(self.wanted)} tensors"
            raise ValueError(f"quads_nvfp4: the checkpoint lacks {count}: {first_names(missing, 8)}. {_REMEDY}")
        if absent:
            logger.warning(
                "quads_nvfp4: the checkpoint has names that are not known here; could not check whether it is complete "
                "in %s",
                first_names(sorted(absent), 8),
            )

    def _noted(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            canonical = self.table.canonical(name)
            want = self.wanted.get(canonical)
            if canonical in self.seen and want is not None and want.quantized:
                raise ValueError(
                    f"quads_nvfp4: the checkpoint holds {name} twice. Remove the file that does not belong to it, or "
                    "add the index (model.safetensors.index.json) that says which one does"
                )
            self.seen.add(canonical)
            self._last = (name, tuple(tensor.shape))
            yield name, tensor

    def _shape_problem(self) -> str | None:
        """What is wrong with the tensor in hand, if its shape is."""
        name, shape = self._last or ("", ())
        want = self.wanted.get(self.table.canonical(name))
        if want is None or want.shape is None or shape == want.shape:
            return None
        return (
            f"quads_nvfp4: {name} has shape {shape} in the checkpoint; the model that config.json describes needs "
            f"{want.shape}. Use the weights and the config.json of one model"
        )

    def _came_otherwise(self, want: checkpoint_map.Wanted) -> bool:
        """It is not for this worker, or in a larger tensor: matrices joined as in vLLM, or all experts."""
        name = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}.get(want.parameter.rpartition(".")[2])
        joined = {want.parameter} if name is None else {f"{want.module}.{name}", f"{want.module}.{name}.weight"}
        return want.elsewhere or not self.seen.isdisjoint({self.table.canonical(one) for one in joined})
