"""The end of a recipe with a language model, from the recipe's LANGUAGE and CONFIG."""

import torch
from transformers import DynamicCache

SHAPES = [
    {"name": "prefill", "args": {"batch": 1, "tokens": 2048, "past": 0}},
    {"name": "decode", "args": {"batch": 16, "tokens": 1, "past": 512}},
]


class Model(torch.nn.Module):
    def __init__(self, batch, past):
        super().__init__()
        self.model = LANGUAGE(CONFIG).eval()
        heads, width = CONFIG.num_key_value_heads, CONFIG.hidden_size // CONFIG.num_attention_heads
        # Keys and values of each layer.
        self.register_buffer("past", torch.randn(CONFIG.num_hidden_layers, 2, batch, heads, past, width))

    def forward(self, tokens):
        cache = DynamicCache(config=self.model.config)
        for layer, (keys, values) in enumerate(self.past if self.past.numel() else ()):
            cache.update(keys, values, layer)
        return self.model(tokens, cache=cache, use_cache=True, logits_to_keep=512).logits


def get_inputs(batch, tokens):
    return [torch.randint(CONFIG.vocab_size, (batch, tokens))]


def get_init_inputs(batch, past):
    return [batch, past]
