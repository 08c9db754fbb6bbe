"""``RayLLMCollector``: collectors in actors of a Ray cluster."""
