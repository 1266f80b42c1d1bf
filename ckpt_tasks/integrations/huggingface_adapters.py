"""What adapters of PEFT keep outside of their model's state: ranks of AdaLoRA, and how each adapter is made."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

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
        if self._texts.keys() != configs.keys():  # A configuration does not change while it trains.
            self._texts = {name: _text(config, self._model) for name, config in configs.items()}
        return {"peft_adapters": self._texts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the model's own: its adapters were made by them."""


def _text(config: Any, model: Any) -> str:
    own = copy.copy(config)
    own.inference_mode = True
    base = model.get_base_model()
    own.base_model_name_or_path = own.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    if own.task_type is None:  # AutoPeftModel finds the base model's class by it.
        own.auto_mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    return json.dumps(own.to_dict(), indent=2, sort_keys=True, default=sorted)


class AdaLoraRanks:
    """The values that AdaLoRA needs and its model's state lacks: the importance of each rank, and the remaining ranks.

    ``state = {"model": model, "ranks": AdaLoraRanks(model), ...}``. CkptTrainer and `state_of` add it themselves.
    """

    def __init__(self, model: Any):
        self._allocator = model.base_model.rankallocator
        self._parameters = dict(model.base_model.model.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by parameter, and the ranks in use."""
        averages = {name: getattr(self._allocator, name) for name in _AVERAGES}
        return {**averages, "rank_pattern": self._allocator.peft_config.rank_pattern}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the averages, each on its parameter's device, and the ranks in use."""
        for name in _AVERAGES:
            own = {key: value.to(self._parameters[key].device) for key, value in state_dict[name].items()}
            setattr(self._allocator, name, own)
        self._allocator.peft_config.rank_pattern = state_dict["rank_pattern"]
