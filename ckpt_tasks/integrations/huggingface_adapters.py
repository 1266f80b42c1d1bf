"""The state of PEFT adapters that is not in the model's state, and models whose frozen base is not stored."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ckpt_tasks.checked import checked
from ckpt_tasks.errors import ConfigError, StateError, StateMismatchError
from ckpt_tasks.format.digests import Digest

_VIEWED: WeakKeyDictionary[nn.Module, tuple[nn.Module, set[str]]] = WeakKeyDictionary()
_AVERAGES = ("ipt", "exp_avg_ipt", "exp_avg_unc")


class AdapterConfigs:
    """The configurations of a PeftModel's adapters, for `ckpt export --format peft`; a restore does not change them.

    ``state = {"model": model, "adapters": AdapterConfigs(model), ...}``. CkptTrainer saves them itself.
    """

    def __init__(self, model: Any):
        self._model = model
        self._texts: dict[str, str] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the text of adapter_config.json by adapter, as PEFT's save_pretrained writes it."""
        configs = getattr(self._model, "peft_config", {})
        if self._texts.keys() != configs.keys():  # A configuration does not change during training.
            self._texts = {name: _text(config, self._model) for name, config in configs.items()}
        return {"peft_adapters": self._texts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing: the program has made the adapters from the model's own configurations."""


def _text(config: Any, model: Any) -> str:
    own = copy.copy(config)
    own.inference_mode = True
    base = model.get_base_model()
    own.base_model_name_or_path = own.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    if own.task_type is None:  # AutoPeftModel finds the base model's class by this mapping.
        own.auto_mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    return json.dumps(own.to_dict(), indent=2, sort_keys=True, default=sorted)


class AdaLoraRanks:
    """The values that AdaLoRA needs and its model's state lacks: the importance of each rank, and the remaining ranks.

    ``state = {"model": model, "ranks": AdaLoraRanks(model), ...}``. CkptTrainer and `state_of` add it themselves.
    """

    def __init__(self, model: Any):
        self._model, self._allocator = model.base_model, model.base_model.rankallocator
        self._parameters = dict(model.base_model.model.named_parameters())

    def covered(self) -> list[Any]:
        """Return the module whose ranks these are."""
        return [self._model]

    def state_dict(self) -> dict[str, Any]:
        """Return AdaLoRA's averages by parameter, and the LoRA ranks that are in use."""
        averages = {name: getattr(self._allocator, name) for name in _AVERAGES}
        return {**averages, "rank_pattern": self._allocator.peft_config.rank_pattern}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the averages, each on its parameter's device, and the LoRA ranks that are in use."""
        for name in _AVERAGES:
            own = {key: value.to(self._parameters[key].device) for key, value in state_dict[name].items()}
            setattr(self._allocator, name, own)
        self._allocator.peft_config.rank_pattern = state_dict["rank_pattern"]


@checked
def without_base(model: nn.Module, source: str) -> dict[str, Any]:
    """Return the state of a model without its frozen base: `source` names the base; a restore compares its digest.

    ``state = {**without_base(model, "org/name@revision"), "optimizer": optimizer}``. The base is every tensor of the
    state_dict that needs no gradient and is not of a PEFT adapter. Call this after making adapters and freezing layers
    and after `fully_shard`, and before DistributedDataParallel. Reads all of the base once.

    Raises ConfigError if nothing is frozen; a save raises StateError if the base has changed since, and a restore
    StateMismatchError if the run has another base.
    """
    adapters = {*getattr(model, "peft_config", ())}
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    base = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and name not in trained and adapters.isdisjoint(name.split("."))
    }
    if not base:
        raise ConfigError("the model has no frozen base", hint="Freeze it first: p.requires_grad_(False).")
    state = {"model": _WithoutBase(model, {*base}), "base": _Base(source, base)}
    return {**state, "adapters": AdapterConfigs(model)} if adapters else state


class _WithoutBase(nn.Module):
    """The same module under another class, whose state_dict lacks the base."""

    def __init__(self, model: nn.Module, base: set[str]):
        self.__dict__ = model.__dict__
        _VIEWED[self] = model, base

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        model, base = _VIEWED[self]
        state = model.state_dict(*args, **kwargs)
        for name in base:
            del state[name]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        model, _ = _VIEWED[self]
        return model.load_state_dict(
            state_dict, strict=False
        )  # The base gets no values. A restore has compared the other names.


class _Base:
    """The tensors that are not stored: their source, and the digest of their bytes."""

    def __init__(self, source: str, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors
        self._own = {"source": source, "digest": self._digest(), "tensors": len(tensors)}
        self._versions = {name: value._version for name, value in tensors.items()}

    def _digest(self) -> str:
        digest = Digest()
        for name in sorted(self._tensors):
            value = self._tensors[name].detach()
            value = getattr(value, "full_tensor", lambda own=value: own)()  # of a model that is sharded
            digest.update(f"{name} {value.dtype} {[*value.shape]} ".encode())
            digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        versions = {name: value._version for name, value in self._tensors.items()}
        written = [name for name in versions if versions[name] != self._versions[name]]
        # DistributedDataParallel writes the same values again. A digest of shards would need all ranks to take part.
        sharded = any(hasattr(value, "full_tensor") for value in self._tensors.values())
        if written and (sharded or self._digest() != self._own["digest"]):
            raise StateError(
                "a tensor of the base, which is not stored, has changed",
                key=written[0],
                hint="Save the whole model instead, or call without_base() after the change.",
            )
        self._versions = versions
        return {"base": self._own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        saved = state_dict["base"]
        if saved["digest"] != self._own["digest"]:
            raise StateMismatchError(
                "the base is another one: {source} with {tensors} tensors, digest {digest}".format(**self._own),
                different=("the run has {source} with {tensors} tensors, digest {digest}".format(**saved),),
                hint=f"Make the model from {saved['source']}, in the same dtype and with the same layers frozen.",
            )
