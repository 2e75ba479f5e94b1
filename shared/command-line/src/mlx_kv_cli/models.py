"""From `--model` to a loaded model: a hub id, a folder, or `smollm2`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_kv_cli import lm
from mlx_kv_cli.errors import UserError
from mlx_kv_cli.smollm2 import ensure_model, model_folder

PACKAGED = "smollm2"


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    name: as the user wrote it; dtype: of the weights in use, such as "float32"; notes: sentences the user should see.
    """

    name: str
    model: lm.Model
    tokenizer: lm.Tokenizer
    dtype: str
    notes: tuple[str, ...] = ()


def load_model(name: str, status: Callable[[str], None] = lambda _: None) -> LoadedModel:
    """Load a model and its tokenizer; `status` hears what is being done.

    On the CPU, half-precision weights are converted to float32: MLX's CPU matrix products are very slow in half
    precision.
    Raises UserError when there is no such model or it cannot be loaded.
    """
    path = _locate(name, status)
    status(f"Loading {name}")
    try:
        model, tokenizer = lm.load_weights(path)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"cannot load model {name}: {reason[0]}") from error
    notes: list[str] = []
    dtype = lm.float_dtype(model)
    convert = mx.default_device().type == mx.DeviceType.cpu and dtype != mx.float32
    if convert:
        notes.append(f"on the CPU the model runs in float32 ({_name(dtype)} is very slow there)")
    lm.materialise(model, mx.float32 if convert else None)
    return LoadedModel(name, model, tokenizer, _name(mx.float32 if convert else dtype), tuple(notes))


def _locate(name: str, status: Callable[[str], None]) -> str:
    if name == PACKAGED and not Path(name).exists():
        folder = model_folder()
        if not folder.is_dir():
            status(f"Converting SmolLM2-135M-Instruct, once, into {folder}")
        return str(ensure_model(folder))
    folder = Path(name).expanduser()
    looks_local = name.startswith((".", "~", os.sep)) or name.count("/") > 1
    if looks_local and not folder.is_dir():
        raise UserError(f"cannot load model {name}: there is no such folder")
    return str(folder) if folder.is_dir() else name


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def encode_prompt(
    tokenizer: lm.Tokenizer,
    prompt: str,
    *,
    system_prompt: str | None = None,
    prefill_response: str | None = None,
    ignore_chat_template: bool = False,
    continues: bool = False,
    **template_options: object,
) -> list[int]:
    """The prompt's tokens, through the model's chat template when it has one (as `mlx_lm generate` does).

    continues: the prompt goes on where a saved cache ends, inside the user's message: nothing comes before it.
    """
    if ignore_chat_template or not tokenizer.has_chat_template:
        return tokenizer.encode(prompt, add_special_tokens=not continues)
    messages = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    messages.append({"role": "user", "content": prompt})
    if prefill_response is not None:
        messages.append({"role": "assistant", "content": prefill_response})
    options = {
        "tokenize": False,
        "continue_final_message": prefill_response is not None,
        "add_generation_prompt": prefill_response is None,
        **template_options,
    }
    text: str = tokenizer.apply_chat_template(messages, **options)
    if continues:
        user = next(message for message in messages if message["role"] == "user")
        user["content"] = mark = "<query>"
        marked: str = tokenizer.apply_chat_template(messages, **options)
        text = text[marked.index(mark) :]
    return tokenizer.encode(text, add_special_tokens=False)
