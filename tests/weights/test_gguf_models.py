"""GGUF files of every Qwen3.x architecture against `transformers`, and what is refused."""

import pytest
import torch
from gguf_models import MODELS, make_model, write_model

from lampejo import ops
from lampejo.loader import load_target
from lampejo.weights.checkpoint import open_checkpoint
from oracle import causal_attention

IDS = [3, 17, 41, 5, 5, 88, 60, 2, 9, 33, 71, 28]


class WholeText:
    """Attention and recurrence of one text without any cache."""

    def __init__(self, config):
        self.config = config

    def __call__(self, *args):
        return causal_attention(*args)

    def recur(self, layer, mixed, log_decay, beta, conv_weight):
        sizes = self.config.delta_net
        window = torch.zeros(conv_weight.shape[0], conv_weight.shape[1] - 1)
        state = torch.zeros(sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim)
        return ops.delta_net(mixed, log_decay, beta, conv_weight, sizes, window, state)[0]


@torch.inference_mode()
def logits_of(path):
    with open_checkpoint(path) as checkpoint:
        target = load_target(checkpoint)
        hidden, _ = target(torch.tensor(IDS), torch.arange(len(IDS)), WholeText(checkpoint.config))
        return target.logits(hidden)


@torch.inference_mode()
def expected(model):
    return model(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize("arch", MODELS)
def test_logits_equal_those_of_the_model_that_was_converted(tmp_path, arch):
    """Faults: norms, decays, heads or projections left as the converter changed them; RoPE over the whole head."""
    model = make_model(arch)
    path = write_model(tmp_path / "m.gguf", arch, model)
    torch.testing.assert_close(logits_of(path), expected(model), rtol=1e-4, atol=1e-4)
