"""The contenders of each benchmark."""
