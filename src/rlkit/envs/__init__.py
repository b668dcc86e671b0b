"""The environments that rlkit brings. They build on the core, which knows none of them."""
