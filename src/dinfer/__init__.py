"""dInfer: inference for diffusion language models."""
