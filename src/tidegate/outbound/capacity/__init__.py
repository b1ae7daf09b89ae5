"""What responses teach about a provider's capacity, and how processes share it."""
