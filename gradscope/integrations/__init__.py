"""Integrations with other trainers, one module each, imported only on request."""
