"""kljax inside other trainers, a module each; nothing here is loaded by `import kljax`."""
