"""Files of models: folders, config.json, weight files, tokenizers and chat templates."""
