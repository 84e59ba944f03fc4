"""The programs that phases launch. Only here are torch, vLLM, transformers and accelerate imported."""
