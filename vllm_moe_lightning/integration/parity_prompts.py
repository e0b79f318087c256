"""Prompts of `check` where the user gives none: prose, code, figures and other scripts, short and long, so that many
different experts are chosen."""

PROMPTS = (
    "The",
    "In the beginning",
    "Explain in one paragraph why the sky is blue and sunsets are red.",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "Q: A train leaves at 14:35 and arrives at 17:20. How long does it take?\nA:",
    "3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5, 0, 2, 8, 8,",
    "Übersetze ins Englische: Der Zug fährt über die Brücke, und der Fluss glänzt in der Abendsonne.",
    "Il était une fois, dans un petit village au bord de la mer, un pêcheur qui",
    "今天天气很好，我们一起去公园散步吧。",
    "SELECT customer, SUM(amount) AS total FROM orders WHERE year = 2024 GROUP BY customer ORDER BY total DESC;",
    '{"name": "Ada", "born": 1815, "works": ["notes on the analytical engine"], "languages": ["en", "fr"]}',
    "Dear Sir or Madam,\n\nI am writing to complain about the delivery of my order, which was promised for Monday and "
    "had not arrived by Friday. When I called your service line I was told that",
    "The mitochondrion is the part of the cell that turns nutrients into energy. Its inner membrane is folded, so that "
    "there is more surface for the reactions that make ATP. Unlike other organelles it has DNA of its own, which is "
    "taken as a sign that",
    "import numpy as np\n\n\ndef softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:\n    x = x - x.max(axis=axis, "
    "keepdims=True)\n    e = np.exp(x)\n    return e / e.sum(axis=axis, keepdims=True)\n\n\nclass Attention:\n    def "
    "__init__(self, dim: int, num_heads: int) -> None:\n        self.dim = dim\n        self.num_heads = num_heads\n",
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings and arrows of "
    "outrageous fortune, or to take arms against a sea of troubles and by opposing end them.",
    "Once upon a midnight dreary, while I pondered, weak and weary, over many a quaint and curious volume of forgotten "
    "lore",
)
