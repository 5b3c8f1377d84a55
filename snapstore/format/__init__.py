"""The stored format, one module per object of `format_spec/`. Pure: bytes in, values out."""
