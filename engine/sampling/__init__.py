"""From logits to tokens: probability laws, shared noise, grammars."""
