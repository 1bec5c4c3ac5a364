"""Texts to compare tokenizers on: words, numbers, code, scripts of the world, white space, special tokens."""

import random

FREQUENT = """
the of and a to in is you that it he was for on are as with his they I at be this have from or one had by word
but not what all were we when your can said there use an each which she do how their if will up other about
out many then them these so some her would make like him into time has look two more write go see number no
way could people my than first water been call who oil its now find long down day did get come made may part
"""
WORDS = FREQUENT.split()
SCRIPTS = (
    (0x00C0, 0x024F),
    (0x0370, 0x03FF),
    (0x0400, 0x04FF),
    (0x0590, 0x05EA),
    (0x0620, 0x06FF),
    (0x0900, 0x097F),
    (0x0E01, 0x0E3A),
    (0x1E00, 0x1EFF),
    (0x2000, 0x206F),
    (0x2150, 0x218B),
    (0x2460, 0x24FF),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0xFF00, 0xFFEF),
    (0x1F300, 0x1F6FF),
    (0x0300, 0x036F),
)
CODE = (
    "def f(x):\n    return x ** 2",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}",
    "SELECT name, COUNT(*) FROM t WHERE x >= 3.5 AND y <> 'a' GROUP BY 1;",
    '{"key": [1, 2.5e-3, null, true], "other": "\\u00e9"}',
    "<div class='a'>&nbsp;text</div>",
    "x = np.einsum('bij,bjk->bik', a, b)  # product",
    "git commit -m 'fix' && make test >/dev/null 2>&1",
    "\\frac{1}{2} \\sum_{i=0}^{n} x_i^2",
    "https://example.org/a?b=c&d=%20e#f",
)
SPACES = (" ", "  ", "\n", "\n\n", "\t", " \n ", "\r\n", "   ", "\u00a0", "\u3000")
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|im_start", "im_end|>", "<s>")
MARKS = (
    *(".", ",", "!", "?"),
    *("'s", "'t", "'re", "-", "--", "...", "(", ")", '"', "$", "%", "/", "_", "'", "\u2019s", "—"),
)


def _number(rng: random.Random) -> str:
    forms = (
        lambda: str(rng.randrange(10 ** rng.randint(1, 12))),
        lambda: f"{rng.uniform(0, 1e6):,.{rng.randint(0, 6)}f}",
        lambda: f"{rng.random():e}",
        lambda: hex(rng.getrandbits(40)),
        lambda: f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}",
        lambda: f"{rng.randint(-99, 99)} + {rng.randint(-99, 99)} = ",
    )
    return rng.choice(forms)()


def _script(rng: random.Random) -> str:
    first, last = rng.choice(SCRIPTS)
    return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 8)))


def _word(rng: random.Random) -> str:
    word = rng.choice(WORDS)
    return rng.choice((word, word, word.capitalize(), word.upper(), word + rng.choice(WORDS)))


def texts(count: int, seed: int = 0) -> list[str]:
    """Draws texts of 0 to 24 parts; the same for the same seed on every system."""
    rng = random.Random(seed)
    kinds = (
        *[_word] * 8,
        *[_number] * 3,
        *[_script] * 2,
        lambda r: r.choice(CODE),
        lambda r: r.choice(SPACES),
        lambda r: r.choice(MARKS),
        lambda r: r.choice(SPECIAL),
    )
    lines = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(0, 24)):
            parts += [rng.choice(kinds)(rng), rng.choice((" ", " ", " ", "", "", rng.choice(SPACES)))]
        lines.append("".join(parts))
    return lines
