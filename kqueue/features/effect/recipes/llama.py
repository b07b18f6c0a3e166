"""A Llama of 8 layers, 2048 wide, with 0.5 billion parameters."""

from transformers import LlamaConfig, LlamaForCausalLM

LANGUAGE = LlamaForCausalLM
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 32}
CONFIG = LlamaConfig(**SIZES, num_key_value_heads=4, vocab_size=32000)
