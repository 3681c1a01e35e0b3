"""A JAX-native LLM serving engine around PagedAttention."""
