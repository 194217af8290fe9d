"""One HTML file that fetches nothing: findings, sections with figures and tables, and a viewer of tokens."""
