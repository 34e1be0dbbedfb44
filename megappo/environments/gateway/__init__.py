"""The HTTP gateway at which agents find the model: OpenAI's and Anthropic's protocols, recorded token by token."""
