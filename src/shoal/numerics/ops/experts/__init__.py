"""Operations of a mixture of experts: the experts themselves, their products, and the scores of a router."""
