"""What model files share: attention, norms, rotary embedding, the transformer stack."""
