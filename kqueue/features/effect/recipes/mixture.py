"""A Mixtral of 6 layers, 1024 wide, with 8 experts."""

from transformers import MixtralConfig, MixtralForCausalLM

LANGUAGE = MixtralForCausalLM
SIZES = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 6, "num_attention_heads": 16}
# The default, a loop over the experts, waits for the GPU.
MORE = {"rms_norm_eps": 1e-6, "num_local_experts": 8, "experts_implementation": "grouped_mm"}
CONFIG = MixtralConfig(**SIZES, **MORE, num_key_value_heads=4, vocab_size=32000)
