"""A Record in the layouts of other tools, against what those tools document and against the model's own outputs."""

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from small_models import LM, TRANSLATOR, made

import attnlab
from attnlab.records.exchange import save_npz, to_bertviz, to_inseq, to_numpy, to_transformer_lens


def recorded(name):
    torch.manual_seed(0)
    model = getattr(tiny_models, name)().double().eval()
    batch = tiny_models.padded_batch(model)
    return model, batch, attnlab.record(model, batch)


def test_the_names_and_shapes_of_transformer_lens():
    model, batch, record = recorded("gpt2")
    cache = to_transformer_lens(record)
    h, d, e = 3, 5, 15
    shapes = {
        "attn.hook_pattern": (3, h, 11, 11), "attn.hook_v": (3, 11, h, d), "attn.hook_z": (3, 11, h, d),
        "attn.hook_result": (3, 11, h, e), "hook_attn_out": (3, 11, e), "hook_resid_pre": (3, 11, e),
        "hook_resid_mid": (3, 11, e),
    }  # fmt: skip
    assert {name: tuple(x.shape) for name, x in cache.items() if name.startswith("blocks.1.")} == {
        f"blocks.1.{name}": shape for name, shape in shapes.items()
    }
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    for k in range(3):
        tokens = batch["attention_mask"].bool()
        torch.testing.assert_close(cache[f"blocks.{k}.hook_resid_pre"][tokens], states[k][tokens])
        bias = record.layers[k].output_bias
        summed = cache[f"blocks.{k}.attn.hook_result"].sum(2) + bias
        torch.testing.assert_close(summed, cache[f"blocks.{k}.hook_attn_out"])
    names = to_transformer_lens(recorded("marian")[2])
    assert {"encoder.1.attn.hook_pattern", "decoder.2.cross_attn.hook_pattern", "decoder.2.attn.hook_z"} <= set(names)
    grouped = to_transformer_lens(recorded("llama")[2])
    assert grouped["blocks.0.attn.hook_v"].shape[2] < grouped["blocks.0.attn.hook_z"].shape[2]


def test_the_arguments_of_bertviz():
    _, _, record = recorded("bert")
    shown = to_bertviz(record, 1)
    assert [tuple(x.shape) for x in shown["attention"]] == [(1, 3, 7, 7)] * 3  # the second example has 7 tokens
    assert len(shown["tokens"]) == 7
    torch.testing.assert_close(shown["attention"][2][0], record.layers[2].weights[1, :, :7, :7])
    both = to_bertviz(recorded("marian")[2], 0)
    assert set(both) == {
        "encoder_attention", "decoder_attention", "cross_attention", "encoder_tokens", "decoder_tokens",
    }  # fmt: skip
    assert tuple(both["cross_attention"][0].shape) == (1, 2, 5, 11)
    assert (len(both["encoder_tokens"]), len(both["decoder_tokens"])) == (11, 5)


def test_patches_of_a_picture_are_named_by_their_positions():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    model = transformers.ViTModel(transformers.ViTConfig(image_size=8, patch_size=4, **sizes)).eval()
    shown = to_bertviz(attnlab.record(model, {"pixel_values": torch.rand(2, 3, 8, 8)}), 1)
    assert shown["tokens"] == ["0", "1", "2", "3", "4"]
    assert tuple(shown["attention"][0].shape) == (1, 2, 5, 5)


def test_the_arrays_of_inseq():
    record = attnlab.record(made(TRANSLATOR), (torch.tensor([[3, 5, 7, 0]]), torch.tensor([[2, 9, 4, 17, 0]])))
    one = to_inseq(record)
    assert one["source"] == ["3", "5", "7"]
    assert one["target"] == ["2", "9", "4", "17"]
    assert tuple(one["source_attributions"].shape) == (3, 4, 2, 3)
    assert tuple(one["target_attributions"].shape) == (4, 4, 2, 3)
    weights = record.kind("cross")[1].weights
    assert one["source_attributions"][2, 3, 1, 0] == weights[0, 0, 2, 2]  # token 3 is written by the query that reads 2
    written = one["target_attributions"]
    assert written[:, 0].isnan().all()
    assert written[2:, 2].isnan().all()  # neither itself nor what follows
    assert not written[:2, 2].isnan().any()
    with pytest.raises(ValueError, match="encoder-self layers only"):
        to_inseq(recorded("bert")[2])


def test_every_tensor_is_an_array_in_a_file_without_pickle(tmp_path):
    record = attnlab.record(made(LM), torch.tensor([[2, 9, 4, 17]]))
    save_npz(record, tmp_path / "record.npz")
    with np.load(tmp_path / "record.npz", allow_pickle=False) as stored:
        assert set(stored) == set(to_numpy(record))
        np.testing.assert_array_equal(stored["decoder-self/1/weights"], record.layers[1].weights.numpy())
        np.testing.assert_array_equal(stored["tokens/target"], [[2, 9, 4, 17]])
        assert "decoder-self/0/around.residual" in stored
    with pytest.raises(ValueError, match=r"must end in \.npz"):
        save_npz(record, tmp_path / "record.zip")


def test_half_precision_and_words_become_arrays():
    model = tiny_models.gpt2().bfloat16().eval()
    record = attnlab.record(model, "the cat sat on the mat", tokenizer=tiny_models.tokenizer())
    arrays = to_numpy(record)
    assert arrays["decoder-self/0/weights"].dtype == np.float32
    assert arrays["words/target"].shape == record.tokens["target"].shape
