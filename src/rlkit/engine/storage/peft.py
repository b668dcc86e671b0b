"""Adapters in the format of the `peft` package, for download.

Invariant: `peft.PeftModel.from_pretrained` on the base model gives the log-probabilities of the model in training. For
experts that are trained, a model merged by tinker-cookbook does: transformers fuses them, so peft cannot adapt each.

The output layer is `lm_head`. If the embedding is tied to it, `peft` adapts only the output, as in training, and warns
that merging into the shared matrix would also change the input. Untie the matrices before merging.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from rlkit._util.model_names import hub_id
from rlkit.engine.model.lora import ALPHA, GROUPS, Adapter
from rlkit.engine.storage.checkpoints import CheckpointInfo
from rlkit.errors import UsageError

_RECIPIENTS_MAX = 10
_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    **{f"delta_{name}": f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")},
    "delta_out": "linear_attn.out_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "unembed": "lm_head",
}
_EXPERT_MODULES = {"gate": "mlp.experts.w1", "down": "mlp.experts.w2", "up": "mlp.experts.w3"}


def write_external(info: CheckpointInfo, adapter: Adapter, recipients: Sequence[str] = ()) -> Callable[[Path], None]:
    """Return a function that writes the files of an adapter for download to a checkpoint's folder.

    Args:
        recipients: `age` or SSH public keys; if given, the files are encrypted to them and get the suffix `.age`.
    """
    if adapter.config.fused:
        raise UsageError(
            f"save_weights_external: the matrices of {info.base_model} are fused, which peft does not support"
        )
    encrypt = _make_encryption(recipients)

    def write(folder: Path) -> None:
        for file, content in _files(info, adapter):
            if encrypt is None:
                (folder / file).write_bytes(content)
            else:
                (folder / f"{file}.age").write_bytes(encrypt(content))

    return write


def peft_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """Return the adapter's matrices by their names in peft, in the shapes of `torch.nn.Linear`.

    A is `[r, in]`, B `[out, r]`. Those of the experts of a layer are stacked, with the names of the hosted service.
    """
    rank = adapter.settings.rank
    tensors: dict[str, list[Tensor]] = {}
    for name in [name for name in adapter.views if name.endswith(".lora_A")]:
        stem, _, group = name.removesuffix(".lora_A").rpartition(".")
        layer, _, expert = stem.partition(".experts.")
        for index, part in enumerate(GROUPS[group]):
            a = adapter.views[name][index * rank : (index + 1) * rank]
            b = adapter.views[f"{stem}.{part}.lora_B" if stem else f"{part}.lora_B"]
            module = _EXPERT_MODULES[part] if expert else _MODULES[part]
            key = f"base_model.model.{f'model.{layer}.' if layer else ''}{module}"
            tensors.setdefault(f"{key}.lora_A.weight", []).append(a.detach())
            tensors.setdefault(f"{key}.lora_B.weight", []).append(b.detach().t())
    return {
        name: torch.stack(parts) if ".experts." in name else parts[0].clone(memory_format=torch.contiguous_format)
        for name, parts in tensors.items()
    }


def _files(info: CheckpointInfo, adapter: Adapter) -> Iterator[tuple[str, bytes]]:
    tensors = peft_tensors(adapter.to(torch.device("cpu")))
    yield "adapter_model.safetensors", save(tensors, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hub_id(info.base_model),
        "r": info.settings.rank,
        "lora_alpha": int(ALPHA),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }
    yield "adapter_config.json", json.dumps(config, indent=1).encode()


def _make_encryption(recipients: Sequence[str]) -> Callable[[bytes], bytes] | None:
    """Return a function that encrypts a file to public keys; None without keys."""
    if not recipients:
        return None
    if len(recipients) > _RECIPIENTS_MAX:
        raise UsageError(f"age_encryption_recipients: at most {_RECIPIENTS_MAX} keys, not {len(recipients)}")
    import pyrage

    library: Any = pyrage  # it has no type information
    try:
        keys = [
            (library.x25519 if key.startswith("age1") else library.ssh).Recipient.from_str(key) for key in recipients
        ]
    except library.RecipientError as error:
        raise UsageError(f"age_encryption_recipients: not an age or SSH public key ({error})") from None
    return lambda content: bytes(library.encrypt(content, keys))
