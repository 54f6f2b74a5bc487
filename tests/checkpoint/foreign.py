"""Writers of foreign checkpoints, to their documented layout, from tensors by Weft's names."""

from __future__ import annotations

import argparse
import enum
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from weft.layout.mesh import Mesh
from weft.models.rope import frequencies
from weft.models.transformer import Transformer
from weft.recipe import ModelShape
from weft.shapes.config import config_from_shape
from weft.shapes.foreign_names import hf_name

Weights = Mapping[str, torch.Tensor]


def weights_of(
    shape: ModelShape, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random tensors for every parameter; no two elements are likely to be equal."""
    g = torch.Generator().manual_seed(seed)
    logical = Transformer(shape, Mesh.single()).logical_parameters()
    return {
        name: torch.randn(one.shape, generator=g).to(dtype) for name, one in logical
    }


def write_config(folder: Path, shape: ModelShape) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_from_shape(shape)))


def to_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """q or k rows from Hugging Face's order to Meta's, as Meta's conversion script (inverted) does it."""
    return (
        weight.view(heads, 2, -1, weight.shape[1])
        .transpose(1, 2)
        .reshape(weight.shape)
        .contiguous()
    )


class Stage(enum.IntEnum):
    """As deepspeed.runtime.zero.config.ZeroStageEnum: a class that a reader cannot take for granted."""

    optimizer_states = 1
    gradients = 2
    weights = 3


TITAN = {
    "embedding.table": "tok_embeddings.weight", "norm.scale": "norm.weight", "head": "output.weight",
    "attention_norm.scale": "attention_norm.weight", "ffn_norm.scale": "ffn_norm.weight",
    "attention.wq": "attention.wq.weight", "attention.wk": "attention.wk.weight",
    "attention.wv": "attention.wv.weight", "attention.wo": "attention.wo.weight",
    "ffn.gate": "feed_forward.w1.weight", "ffn.up": "feed_forward.w3.weight", "ffn.down": "feed_forward.w2.weight",
    "attention.q_norm.scale": "attention.q_norm.weight", "attention.k_norm.scale": "attention.k_norm.weight",
}  # fmt: skip
GGUF = {
    "embedding.table": "token_embd.weight", "norm.scale": "output_norm.weight", "head": "output.weight",
    "attention_norm.scale": "attn_norm.weight", "ffn_norm.scale": "ffn_norm.weight",
    "attention.wq": "attn_q.weight", "attention.wk": "attn_k.weight", "attention.wv": "attn_v.weight",
    "attention.wo": "attn_output.weight", "attention.bq": "attn_q.bias", "attention.bk": "attn_k.bias",
    "attention.bv": "attn_v.bias", "ffn.gate": "ffn_gate.weight", "ffn.up": "ffn_up.weight",
    "ffn.down": "ffn_down.weight", "attention.q_norm.scale": "attn_q_norm.weight",
    "attention.k_norm.scale": "attn_k_norm.weight", "attention_out_norm.scale": "post_attention_norm.weight",
    "ffn_out_norm.scale": "post_ffw_norm.weight",
}  # fmt: skip


def renamed(
    weights: Weights, shape: ModelShape, names: Mapping[str, str], layer: str
) -> dict[str, torch.Tensor]:
    """Under torchtitan's or llama.cpp's names, with q and k in Meta's order where these programs have them so."""
    found = {}
    for name, w in weights.items():
        for part, heads in (
            ("attention.wq", shape.heads),
            ("attention.wk", shape.kv_heads),
        ):
            if name.endswith(part) and not (shape.qk_norm or shape.qkv_bias):
                w = to_pairs(w, heads or 0)
        _, _, rest = name.partition(".")
        number, _, rest = rest.partition(".")
        found[
            layer.format(number) + names[rest]
            if name.startswith("blocks.")
            else names[name]
        ] = w
    return found


def write_dcp(folder: Path, tensors: Weights) -> None:
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def write_deepspeed(
    folder: Path,
    weights: Weights,
    stage: int,
    ranks: int,
    moments: Mapping[str, Weights] | None = None,
    tp: int = 1,
) -> None:
    """ZeRO 1 to 3, two parameter groups, Hugging Face's names (with ``module.`` as wrappers leave it in front).

    Layout as in deepspeed/utils/zero_to_fp32.py and what DeepSpeed 0.19.8 writes.
    """
    tag = folder / "global_step7"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    for t in range(tp):
        states = {"fp32": weights, **(moments or {})}
        flat = {
            key: {hf_name(n): _tp_part(n, w, tp, t) for n, w in values.items()}
            for key, values in states.items()
        }
        names = list(flat["fp32"])
        groups = [
            [n for n in names if flat["fp32"][n].ndim > 1],
            [n for n in names if flat["fp32"][n].ndim == 1],
        ]
        shapes = [{n: flat["fp32"][n].shape for n in group} for group in groups]
        module = (
            {}
            if stage == 3
            else {n: w.to(torch.bfloat16) for n, w in flat["fp32"].items()}
        )
        for rank in range(ranks if stage == 3 else 1):
            file = f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_{t:02d}_model_states.pt"
            about = {"module": module, "param_shapes": shapes, "buffer_names": [], "shared_params": {},
                     "ds_version": "0.19.8", "frozen_param_shapes": None, "frozen_param_fragments": None,
                     "ds_config": argparse.Namespace(a=1)}  # fmt: skip
            torch.save(about, tag / file)
        for rank in range(ranks):
            parts: dict[str, list[torch.Tensor]] = {}
            for key, values in flat.items():
                if stage == 3:
                    parts[key] = [
                        torch.cat([_zero3(values[n], ranks, rank) for n in group])
                        for group in groups
                    ]
                    continue
                for group in groups:
                    whole = torch.cat([values[n].flatten() for n in group])
                    size = 2 * ranks * -(-whole.numel() // (2 * ranks)) // ranks
                    padding = torch.zeros(size * ranks - whole.numel())
                    own = torch.cat([whole, padding])[
                        rank * size : (rank + 1) * size
                    ].clone()
                    # saved without padding, but the moments with it
                    last = rank == ranks - 1 and key == "fp32"
                    parts.setdefault(key, []).append(
                        own[: size - padding.numel()].clone() if last else own
                    )
            state = {
                i: {k: parts[k][i] for k in (moments or {})} | {"step": 7}
                for i in range(len(groups))
            }
            base = {"state": state, "param_groups": [{"lr": 1e-3}]}
            osd: dict[str, Any] = {
                "zero_stage": Stage(stage),
                "partition_count": ranks,
                "ds_version": "0.19.8",
            }
            if stage == 3:
                osd |= {"fp32_flat_groups": parts["fp32"], "optimizer_state_dict": base}
            else:
                osd |= {
                    "single_partition_of_fp32_groups": parts["fp32"],
                    "base_optimizer_state": base,
                }
            torch.save(
                {"optimizer_state_dict": osd},
                tag / f"bf16_zero_pp_rank_{rank}_mp_rank_{t:02d}_optim_states.pt",
            )


def _zero3(w: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    size = -(-w.numel() // ranks)
    return torch.cat([w.flatten(), torch.zeros(size * ranks - w.numel())])[
        rank * size : (rank + 1) * size
    ].clone()


def _tp_part(name: str, w: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    if w.ndim == 1 and ".attention.b" not in name:
        return w
    dim = 1 if name.endswith(("attention.wo", "ffn.down")) else 0
    return w.tensor_split(tp, dim)[rank].contiguous()


def write_universal(
    folder: Path, weights: Weights, moments: Mapping[str, Weights], flat: bool = False
) -> None:
    """DeepSpeed's universal format, as ds_to_universal.py writes it (``flat``: from ZeRO 3)."""
    tag = folder / "global_step7_universal"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest_universal").write_text(tag.name)
    for key, values in {"fp32": weights, **moments}.items():
        for name, w in values.items():
            place = tag / "zero" / hf_name(name)
            place.mkdir(parents=True, exist_ok=True)
            torch.save(
                {"param": w.flatten() if flat else w, "cat_dim": 0}, place / f"{key}.pt"
            )
    for place in (tag / "zero").iterdir():
        torch.save(torch.tensor(7.0), place / "step.pt")


def write_megatron(
    folder: Path,
    weights: Weights,
    shape: ModelShape,
    tp: int,
    pp: int,
    virtual: int = 1,
    pad: int = 8,
) -> None:
    """Megatron-core's legacy ``torch`` format: names and shards as GPTModel's ``state_dict`` has them per rank."""
    step = folder / "iter_0000003"
    step.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    bounds = [round(i * shape.layers / (pp * virtual)) for i in range(pp * virtual + 1)]
    rows = -(-shape.vocab // (pad * tp)) * pad * tp
    for t in range(tp):
        for p in range(pp):
            models: dict[str, dict[str, Any]] = {}
            for v in range(virtual):
                chunk = v * pp + p
                model: dict[str, Any] = {}
                if chunk == 0:
                    model["embedding.word_embeddings.weight"] = _vocab(
                        weights["embedding.table"], rows, tp, t
                    )
                for i, layer in enumerate(range(bounds[chunk], bounds[chunk + 1])):
                    model |= {
                        f"decoder.layers.{i}.{n}": w
                        for n, w in _megatron_layer(
                            weights, shape, layer, tp, t
                        ).items()
                    }
                if chunk == pp * virtual - 1:
                    model["decoder.final_layernorm.weight"] = weights["norm.scale"]
                    model["output_layer.weight"] = _vocab(
                        weights.get("head", weights["embedding.table"]), rows, tp, t
                    )
                models[f"model{v}" if virtual > 1 else "model"] = model
            rank = step / (
                f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}"
            )
            rank.mkdir()
            args = argparse.Namespace(
                num_layers=shape.layers, params_dtype=torch.bfloat16
            )
            torch.save(
                {"args": args, "checkpoint_version": 3.0, "iteration": 3, **models},
                rank / "model_optim_rng.pt",
            )


def _vocab(w: torch.Tensor, rows: int, tp: int, rank: int) -> torch.Tensor:
    return (
        torch.cat([w, torch.full((rows - w.shape[0], w.shape[1]), 9.0, dtype=w.dtype)])
        .chunk(tp)[rank]
        .clone()
    )


def _megatron_layer(
    weights: Weights, shape: ModelShape, layer: int, tp: int, t: int
) -> dict[str, Any]:
    w = {
        name.partition(f"blocks.{layer}.")[2]: value
        for name, value in weights.items()
        if f"blocks.{layer}." in name
    }
    kv, group = shape.kv_heads or 0, shape.heads // (shape.kv_heads or 1)

    def fused(kind: str) -> torch.Tensor:
        # [group, rows, ...]
        q, k, v = (w[f"attention.{kind}{x}"].unflatten(0, (kv, -1)) for x in "qkv")
        assert q.shape[1] == group * (shape.head_dim or 0)
        return torch.cat([q, k, v], 1).flatten(0, 1).chunk(tp)[t].clone()

    found = {
        "self_attention.linear_qkv.layer_norm_weight": w["attention_norm.scale"],
        "self_attention.linear_qkv.weight": fused("w"),
        "self_attention.linear_qkv._extra_state": None,
        "self_attention.linear_proj.weight": w["attention.wo"]
        .chunk(tp, 1)[t]
        .contiguous(),
        "mlp.linear_fc1.layer_norm_weight": w["ffn_norm.scale"],
        "mlp.linear_fc1.weight": torch.cat(
            [w["ffn.gate"].chunk(tp)[t], w["ffn.up"].chunk(tp)[t]]
        ),
        "mlp.linear_fc2.weight": w["ffn.down"].chunk(tp, 1)[t].contiguous(),
    }
    if shape.qkv_bias:
        found["self_attention.linear_qkv.bias"] = fused("b")
    if shape.qk_norm:
        found |= {
            f"self_attention.{x}_layernorm.weight": w[f"attention.{x}_norm.scale"]
            for x in "qk"
        }
    return found


def write_gguf(
    file: Path,
    weights: Weights,
    shape: ModelShape,
    kind: str = "F32",
    tokenizer: Callable[[Any], None] | None = None,
) -> dict[str, torch.Tensor]:
    """A GGUF file by the ``gguf`` package; returns what its own dequantisation makes of it, in Weft's order of rows.

    ``tokenizer`` adds the fields of one to the writer.
    """
    import gguf

    arch = (
        "gemma3"
        if shape.norm_after
        else "qwen3"
        if shape.qk_norm
        else "qwen2"
        if shape.qkv_bias
        else "llama"
    )
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.embed)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads or 0)
    writer.add_key_length(shape.head_dim or 0)
    writer.add_feed_forward_length(shape.ffn or 0)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if tokenizer is not None:
        tokenizer(writer)
    if (scaling := shape.rope_scaling) and scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)
    elif scaling:  # llama.cpp stores what frequencies are divided by
        plain = shape.model_copy(update={"rope_scaling": None})
        writer.add_tensor(
            "rope_freqs.weight",
            (frequencies(plain) / frequencies(shape))[0].float().numpy(),
        )
    expected = {}
    theirs = renamed(weights, shape, GGUF, "blk.{}.")
    for (name, w), w_theirs in zip(weights.items(), theirs.items(), strict=True):
        wanted = gguf.GGMLQuantizationType[kind if w.ndim > 1 else "F32"]
        data = gguf.quants.quantize(w_theirs[1].numpy(), wanted)
        writer.add_tensor(w_theirs[0], data, raw_dtype=wanted)
        expected[name] = torch.from_numpy(
            gguf.quants.dequantize(gguf.quants.quantize(w.numpy(), wanted), wanted)
        ).view(w.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected
