"""What model files share: attention, linear layers, norms, rotary embedding, the transformer stack."""
