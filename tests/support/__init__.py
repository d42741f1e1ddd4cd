"""What the tests share: both implementations side by side, generated arguments, processes."""
