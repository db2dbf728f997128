"""Operations on graphs: find layers, cut, compress, add state, fix shapes."""
