"""A Mixtral of 6 layers, 1024 wide, with 8 experts: a prompt of 2048 tokens, and 16 next tokens at once."""

import torch
from transformers import DynamicCache, MixtralConfig, MixtralForCausalLM

SHAPES = [
    {"name": "prefill", "args": {"batch": 1, "tokens": 2048, "past": 0}},
    {"name": "decode", "args": {"batch": 16, "tokens": 1, "past": 512}},
]
WIDTH, INNER, LAYERS, HEADS, VOCABULARY = 1024, 3584, 6, 16, 32000


class Model(torch.nn.Module):
    def __init__(self, batch, past):
        super().__init__()
        sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-6}
        heads = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 4}
        # The default, a loop over the experts, waits for the GPU.
        experts = {"num_local_experts": 8, "experts_implementation": "grouped_mm"}
        self.model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, **experts)).eval()
        self.register_buffer("past", torch.randn(LAYERS, 2, batch, 4, past, WIDTH // HEADS))  # keys and values

    def forward(self, tokens):
        cache = DynamicCache(config=self.model.config)
        for layer, (keys, values) in enumerate(self.past if self.past.numel() else ()):
            cache.update(keys, values, layer)
        return self.model(tokens, cache=cache, use_cache=True, logits_to_keep=512).logits


def get_inputs(batch, tokens):
    return [torch.randint(VOCABULARY, (batch, tokens))]


def get_init_inputs(batch, past):
    return [batch, past]
