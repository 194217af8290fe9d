"""Responses sampled from a policy, by transformers or vLLM behind one protocol, and how many of them are right."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
