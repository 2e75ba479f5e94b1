"""Tiny random models of mlx-lm: every architecture's cache handling, in milliseconds and without a download."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten  # pyright: ignore[reportUnknownVariableType]

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64, "tie_word_embeddings": False},
    "qwen2": {"hidden_size": 256, "tie_word_embeddings": False},  # head dim is hidden_size / heads: 64
    "qwen3": {"head_dim": 64, "tie_word_embeddings": False},
    "phi3": {"hidden_size": 256, "original_max_position_embeddings": 4096},
    "gemma3_text": {
        "head_dim": 64,
        "num_hidden_layers": 4,
        "sliding_window": 64,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 64,
    },
    "gpt_oss": {
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "layer_types": [_SLIDING, _FULL],
    },
    "qwen3_next": {
        "head_dim": 64,
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 64,
        "intermediate_size": 256,  # num_heads * head_dim
        "state_size": 32,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": (0.001, 10.0),
        "time_step_rank": "auto",
    },
    "gemma2": {"head_dim": 64, "query_pre_attn_scalar": 64.0},
    "stablelm": {
        "hidden_size": 256,
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.5,
        "layer_norm_eps": 1e-5,
    },
    "plamo": {"hidden_size": 256, "n_shared_head": 2},
    "gemma4_text": {
        "head_dim": 64,
        "global_head_dim": 64,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
        "sliding_window": 64,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        "use_double_wide_mlp": False,
    },
    "gemma3n": {
        "head_dim": 64,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 128,
        "sliding_window": 64,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 30.0,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL],
        "activation_sparsity_pattern": [0.0] * 6,
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
}

NAMES = tuple(_CONFIGS)
"""The architectures, by the names of mlx-lm's modules."""


def tiny_model(name: str, seed: int = 0, **overrides: Any) -> Any:
    """Return a random float32 model with a vocabulary of 128, two to six layers and grouped-query attention.

    Weights are larger and embeddings smaller than an untrained model's, so that the next token hangs on the rows of the
    cache and greedy text does not repeat itself. MLX's global random state is left alone.

    Args:
        name: one of `NAMES`.
        seed: of the weights.
        **overrides: fields of the architecture's ModelArgs.

    Raises:
        ValueError: if there is no such architecture here.
    """
    if name not in _CONFIGS:
        raise ValueError(f"[tiny_model] expected one of {', '.join(NAMES)}, got {name!r}")
    module: Any = importlib.import_module(f"mlx_lm.models.{name}")
    fields = {"model_type": name, **_COMMON, **_CONFIGS[name], **overrides}
    if name == "gemma3n":  # the one with its language model inside
        fields = {"model_type": name, "text_config": fields}
    model = module.Model(module.ModelArgs.from_dict(fields))
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    keys = mx.random.split(mx.random.key(seed), len(flat))
    model.update(tree_unflatten([(n, _weights(n, array, key)) for (n, array), key in zip(flat, keys, strict=True)]))
    mx.eval(model.parameters())
    return model.eval()


def _weights(name: str, like: mx.array, key: mx.array) -> mx.array:
    drawn = mx.random.normal(like.shape, mx.float32, key=key)
    if like.ndim < 2:  # norms, biases and sinks keep their level
        return like.astype(mx.float32) + 0.1 * drawn
    if "embed" in name:
        return drawn * 0.05
    return drawn * (1.5 / like.shape[-1] ** 0.5)
