"""Storage ports: opaque bytes by kind and name. Nothing here parses what it stores."""
