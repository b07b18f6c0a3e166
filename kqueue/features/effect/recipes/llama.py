"""A Llama of 8 layers, 2048 wide, with 0.5 billion parameters: a prompt of 2048 tokens, and 16 next tokens at once."""

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

SHAPES = [
    {"name": "prefill", "args": {"batch": 1, "tokens": 2048, "past": 0}},
    {"name": "decode", "args": {"batch": 16, "tokens": 1, "past": 512}},
]
WIDTH, INNER, LAYERS, HEADS, VOCABULARY = 2048, 5632, 8, 32, 32000


class Model(torch.nn.Module):
    def __init__(self, batch, past):
        super().__init__()
        sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": VOCABULARY}
        heads = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
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
