"""How the bundled models are made: problems, masked-diffusion loss, training run."""
