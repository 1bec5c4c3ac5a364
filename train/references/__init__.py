"""Reference policies: found, loaded, followed, recorded, and checked to be unchanged at the end."""
