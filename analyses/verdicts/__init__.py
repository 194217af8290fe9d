"""How often the sentences of a diagnosis are wrong, where the truth over the population of prompts is known."""
