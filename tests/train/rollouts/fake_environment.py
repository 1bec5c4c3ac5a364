"""An environment whose steps are all alike, for files of tests."""


def environment_of(observed: str, *, reward: float, steps: int) -> str:
    """The source of a class `Steps`, which observes an f-string of `text`, and is over after so many steps."""
    return f"""
class Steps:
    count = 0

    def reset(self):
        pass

    def step(self, text):
        self.count += 1
        return f"{observed}", {reward}, self.count == {steps}
"""
