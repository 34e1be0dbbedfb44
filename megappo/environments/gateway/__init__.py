"""Where agents that speak HTTP find the model: OpenAI's and Anthropic's protocols, recorded token by token."""
