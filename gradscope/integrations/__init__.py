"""Inside other trainers: a folder each, imported only on request; `row_writer` writes the rows of both."""
