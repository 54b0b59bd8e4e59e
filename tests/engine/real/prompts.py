"""Fifty prompts in eight languages and code, from a few tokens to about two hundred.

The first prompt of each language is short, the last one is long. Some of the code is repetitive, so that drafts are
accepted.
"""

# ruff: noqa: RUF001 - letters of other scripts look like Latin ones

from __future__ import annotations

BY_LANGUAGE: dict[str, tuple[str, ...]] = {
    "English": (
        "The capital of France is",
        "Once upon a time, in a village at the foot of a mountain, there lived",
        "Water boils at a lower temperature on a mountain because",
        "Three things to check before you buy a used bicycle:\n1.",
        "A library near the harbour keeps the letters of sailors who never came home. Every autumn the librarian reads "
        "ten of them aloud, and the whole town comes to listen. This year she chose letters from a cook, a doctor, and "
        "a boy of fourteen who wrote to his dog. The cook describes a storm. The doctor asks for books. The boy writes "
        "that he has learned the names of all the winds, and he lists them in order:",
    ),
    "German": (
        "Die Hauptstadt von Österreich heißt",
        "Im Winter frieren viele Seen zu, weil",
        "Für einen einfachen Apfelkuchen braucht man Mehl, Butter, Zucker und",
        "Frage: Wie viele Tage hat ein Jahr?\nAntwort:",
        "Der Zug nach Hamburg hatte an diesem Morgen vierzig Minuten Verspätung. Auf dem Bahnsteig standen eine Frau "
        "mit einem Cello, zwei Schüler und ein älterer Herr, der ungeduldig auf seine Uhr schaute. Als die Durchsage "
        "endlich kam, war sie kaum zu verstehen. Die Schüler lachten, der Herr schüttelte den Kopf, und die Frau",
    ),
    "French": (
        "La capitale de l'Italie est",
        "Le matin, avant d'aller au marché, ma grand-mère",
        "Les abeilles sont importantes pour l'agriculture parce qu'elles",
        "Pour apprendre une langue étrangère, il faut d'abord",
        "Le phare de l'île n'est plus habité depuis trente ans, mais quelqu'un en repeint la porte chaque printemps. "
        "Les pêcheurs disent que c'est l'ancien gardien ; les enfants préfèrent croire à un fantôme très soigneux. "
        "L'été dernier, une étudiante a décidé d'en avoir le cœur net. Elle a loué une barque, emporté des provisions, "
        "et, la première nuit,",
    ),
    "Spanish": (
        "La capital de España es",
        "El agua del mar es salada porque",
        "Mi hermana trabaja en un hospital y todos los días",
        "¿Cuáles son los planetas del sistema solar? Los planetas son",
        "En la plaza del pueblo hay un reloj que siempre marca las cinco y diez. Nadie recuerda cuándo se paró. El "
        "alcalde promete cada año que lo arreglará, y cada año los vecinos le piden que lo deje como está: a las cinco "
        "y diez sale el sol en verano, a las cinco y diez meriendan los niños en invierno. Un día llegó un relojero de "
        "la ciudad y dijo:",
    ),
    "Chinese": (
        "中国的首都是",
        "春天来了,公园里的花",
        "学习编程的第一步是",
        "问:一年有几个季节?\n答:",
        "小镇的车站旁边有一家面馆,老板姓王,每天早上四点就开始揉面。来吃面的人里有司机、学生,也有刚下夜班的护士。"
        "王老板记得每个人的口味:谁不要香菜,谁要多加辣椒。有一天,一位陌生的老人走进来,坐在窗边,",
    ),
    "Japanese": (
        "日本の首都は",
        "昔々、ある村に",
        "朝ごはんには、ご飯と味噌汁と",
        "富士山は日本で一番高い山で、高さは",
        "駅前の古い本屋が、今月いっぱいで店を閉めることになった。店主は七十八歳で、五十年間ほとんど休まずに店を"
        "開けてきた。最後の日曜日、常連の客たちが集まって、それぞれ思い出の一冊を持ってきた。小学生のころに買った"
        "図鑑を抱えた女性は、",
    ),
    "Russian": (
        "Столица России — это",
        "Зимой дети любят",
        "Чтобы приготовить борщ, нужно взять свёклу, капусту и",
        "Вопрос: сколько часов в сутках?\nОтвет:",
        "На окраине города стоит старая обсерватория. Телескоп давно не работает, но по пятницам сюда приходят люди с "
        "термосами и пледами, чтобы посмотреть на небо просто так. Сторож, бывший учитель физики, рассказывает им о "
        "созвездиях. Однажды маленькая девочка спросила его,",
    ),
    "Arabic": (
        "عاصمة مصر هي",
        "في الصباح أشرب القهوة ثم",
        "القراءة مفيدة لأنها",
        "سؤال: كم عدد أيام الأسبوع؟\nجواب:",
        "في السوق القديم دكان صغير يصلح الساعات. صاحبه رجل هادئ لا يتكلم كثيرا، لكنه يعرف قصة كل ساعة تدخل دكانه. "
        "هذه ساعة طبيب سافر إلى بلاد بعيدة، وتلك ساعة عروس ورثتها عن جدتها. وفي يوم ماطر دخلت امرأة تحمل ساعة "
        "مكسورة وقالت:",
    ),
    "code": (
        "def fibonacci(n):\n",
        "for (let i = 0; i < 10; i++) {\n",
        "SELECT name, COUNT(*) FROM orders GROUP BY",
        '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born": 1912}\n{"name": "Grace", "born":',
        "#include <stdio.h>\n\nint main(void) {\n    printf(",
        "<ul>\n  <li>one</li>\n  <li>two</li>\n  <li>three</li>\n  <li>four</li>\n",
        "def test_add():\n    assert add(1, 2) == 3\n    assert add(2, 3) == 5\n    assert add(3, 4) == 7\n    assert",
        "fn main() {\n    let numbers = vec![1, 2, 3];\n    let sum: i32 = numbers.iter()",
        "x1 = 1\nx2 = 2\nx3 = 3\nx4 = 4\nx5 = 5\nx6 = 6\nx7 = 7\nx8 = 8\nx9 =",
        '''class Stack:
    """A last-in, first-out collection of items."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("peek at an empty stack")
        return self.items[-1]

    def is_empty(self):
''',
    ),
}

PROMPTS = tuple(prompt for prompts in BY_LANGUAGE.values() for prompt in prompts)
SOME_PROMPTS = tuple(
    prompts[place] for prompts in BY_LANGUAGE.values() for place in ((0, -1) if len(prompts) > 5 else (0,))
)
"""The first prompt of each language, and one long prompt."""
