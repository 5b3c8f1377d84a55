"""The cases of `format_spec/vectors`, encoded by code that shares nothing with `snapstore`."""
