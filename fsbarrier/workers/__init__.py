"""The programs that phases launch. Only here are torch, vLLM and transformers imported."""
