"""gradscope inside other people's trainers, one module per trainer; none is imported before it is asked for."""
