"""Operations on graphs: finding layers, cutting, compressing, adding state, fixing shapes."""
