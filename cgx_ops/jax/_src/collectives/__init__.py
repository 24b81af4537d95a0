"""psum_q and its like, their primitive and how it is lowered."""
