"""HTTP gateway through which agents reach the model, with the OpenAI and Anthropic protocols and recorded tokens."""
