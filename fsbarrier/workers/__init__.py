"""The programs that phases launch. They may import torch, vLLM and transformers."""
