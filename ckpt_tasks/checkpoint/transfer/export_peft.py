"""Export a PEFT adapter in the form that `PeftModel.from_pretrained` loads into a base model.

In a model, the names of an adapter's tensors contain the adapter's name (`….lora_A.default.weight`). PEFT's files omit
the adapter's name. A module's state lacks `adapter_config.json`: AdapterConfigs (integrations/huggingface_adapters.py)
saves this file's contents.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_tasks.checkpoint.transfer.export import (
    ExportedFile,
    ExportPlan,
    ExportReport,
    check_out,
    choose_groups,
    selection,
    shard,
)
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.format.tree import TensorRef
from ckpt_tasks.run.opening import Opened, open_checkpoint
from ckpt_tasks.storage.port import Store

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_CONFIGS = "peft_adapters"  # AdapterConfigs saves the text of each adapter's configuration by name under this key.
_NAMED = {"LORA", "LOHA", "LOKR", "IA3"}  # With these adapter types, every tensor's name contains the adapter's name.
_DEFAULT = "default"  # get_peft_model gives an adapter this name.


def plan_peft_export(
    store: Store,
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    *,
    groups: Iterable[str] | None = None,
    overwrite: bool = False,
) -> ExportPlan:
    """Plan the export of one adapter to the directory `out`; write nothing.

    Exports the adapter called `default`, or the only adapter. Raises ConfigError if the checkpoint lacks that adapter
    or its configuration, or if the names of some of its tensors do not contain the adapter's name.
    """
    target = check_out(store, out, overwrite, one_file=False)
    opened = open_checkpoint(store, checkpoint)
    chosen = choose_groups(opened, groups, ("module",))
    if len(chosen) > 1:
        raise ConfigError(f"{', '.join(chosen)} are several modules", hint="Name the one with the adapter by --group.")
    adapter, text = _adapter(opened)
    names = {}
    left_out = list[str]()
    for name, value in opened.groups[chosen[0]].tree.items():
        if type(value) is TensorRef and (short := _short(name, adapter)) is not None:
            names[short] = value.key
        else:
            left_out.append(f"{chosen[0]}/{name}")
    if not names:
        raise ConfigError(f"{chosen[0]} has no tensor of the adapter {adapter}", hint="Is it a PeftModel's state?")
    picked = selection(opened, names, checkpoint, tuple(left_out))
    file = shard(picked, _WEIGHTS)
    config = text.encode()
    report = ExportReport(
        **picked.origin,
        groups=chosen,
        files=(
            ExportedFile(str(target / _WEIGHTS), len(file.tensors), file.size_bytes),
            ExportedFile(str(target / _CONFIG), 0, len(config)),
        ),
        tied=picked.tied,
        dtypes=picked.dtypes,
        left_out=tuple(left_out),
    )
    return ExportPlan(
        out=target,
        overwrite=overwrite,
        report=report,
        opened=opened,
        shards=(file,),
        index=config,
        index_name=_CONFIG,
        replaces=re.compile(re.escape(_WEIGHTS)),
    )


def _adapter(opened: Opened) -> tuple[str, str]:
    """Return the name of the adapter to export, and its configuration."""
    configs: dict[str, str] = {}
    for saved in opened.groups.values():
        if saved.kind == "stateful" and isinstance(saved.tree, Mapping):
            configs |= saved.tree.get(_CONFIGS) or {}
    step = opened.manifest.step
    if not configs:
        raise ConfigError(
            "the checkpoint has no configuration of an adapter",
            step=step,
            hint='CkptTrainer saves it; in a loop of your own add state["adapters"] = AdapterConfigs(model). '
            "Of this checkpoint: restore it into the PeftModel, and call its save_pretrained.",
        )
    if _DEFAULT not in configs and len(configs) > 1:
        hint = "Restore the checkpoint into the PeftModel, and call its save_pretrained(selected_adapters=[…])."
        raise ConfigError(f"the adapters are {', '.join(configs)}, and none is called {_DEFAULT}", step=step, hint=hint)
    name = _DEFAULT if _DEFAULT in configs else next(iter(configs))
    config: Mapping[str, Any] = json.loads(configs[name])
    others = [key for key in ("trainable_token_indices", "use_bdlora") if config.get(key)]
    if config.get("peft_type") not in _NAMED or config.get("bias", "none") != "none" or others:
        what = f"{config.get('peft_type')}, bias {config.get('bias')}{''.join(f', {key}' for key in others)}"
        raise ConfigError(
            f"the adapter {name} ({what}) has tensors that do not have its name",
            step=step,
            hint="Restore the checkpoint into the PeftModel, and call its save_pretrained.",
        )
    return name, configs[name]


def _short(name: str, adapter: str) -> str | None:
    """Return the name of an adapter's tensor in PEFT's files; None for any other tensor."""
    for part in (f".modules_to_save.{adapter}", f".{adapter}"):
        head, middle, tail = name.rpartition(part)
        if middle and (not tail or tail.startswith(".")):
            if head.endswith(".lora_magnitude_vector"):  # PEFT's files name DoRA's scales without `.weight`.
                return head
            return head + tail
    return None
